"""Conversions against torch's own casts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.kv import KVLayout
from device.convert import convert

TORCH = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def layout(dtype: str, scales: str = "none", head_dim: int = 16) -> KVLayout:
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=head_dim, block_size=4, dtype=dtype, scales=scales)


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


@pytest.mark.parametrize("source", TORCH)
@pytest.mark.parametrize("target", TORCH)
def test_floats_become_what_torch_makes_of_them(source: str, target: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(4096, 16) * torch.logspace(-4, 2, 4096)[:, None]
    values = values.clamp(-448, 448)
    values[0] = torch.tensor([0.0, -0.0, 448, -448, 2**-9, 2**-10, 2**-6, 1.5 * 2**-9, *[1.0625] * 8])
    stored = values.to(TORCH[source])
    got, scales = convert(layout(source), raw(stored), None, layout(target))
    assert scales is None
    assert np.array_equal(got, raw(stored.float().to(TORCH[target])))


def test_every_fp8_code_survives_the_way_through_float32() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values, _ = convert(layout("float8_e4m3fn"), codes, None, layout("float32"))
    expected = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(values.view(np.float32), expected, equal_nan=True)
    back, _ = convert(layout("float32"), values, None, layout("float8_e4m3fn"))
    finite = (codes & 127) != 127
    assert np.array_equal(back[finite], codes[finite])
    assert np.all((back[~finite] & 127) == 127)


def test_what_is_too_large_saturates() -> None:
    values = np.array([1e9, -1e9, 460, 449], np.float32)
    got, _ = convert(layout("float32", head_dim=4), values.view(np.uint8), None, layout("float8_e4m3fn"))
    assert got.tolist() == [126, 254, 126, 126]


@pytest.mark.parametrize(("dtype", "step"), [("int8", 1 / 254), ("float8_e4m3fn", 1 / 16)])
def test_scaled_storage_keeps_each_vector_to_half_a_step(dtype: str, step: float) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((512, 16)) * np.logspace(-6, 6, 512)[:, None]).astype(np.float32)
    values[7] = 0
    stored, scales = convert(
        layout("float32"), values.view(np.uint8).reshape(-1), None, layout(dtype, "vector")
    )
    assert scales is not None
    assert stored.nbytes == values.size
    back, _ = convert(layout(dtype, "vector"), stored, scales, layout("float32"))
    error = np.abs(back.view(np.float32).reshape(512, 16) - values)
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert np.all(error <= largest * step * 1.001)
    assert np.all(back.view(np.float32).reshape(512, 16)[7] == 0)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_latents_have_a_scale_for_each_group_and_the_rotated_part_as_bfloat16(dtype: str) -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((64, 24)) * np.logspace(-3, 3, 24)).astype(np.float32)
    plain = replace(layout("float32", head_dim=24), group=8, kept=(8, 16))
    latents = replace(plain, dtype=dtype, scales="vector")
    assert (latents.vector_bytes, latents.num_scales, plain.vector_bytes) == (8 + 16 + 8, 2, 96)
    stored, scales = convert(plain, values.view(np.uint8).reshape(-1), None, latents)
    assert scales is not None
    rows, each = stored.reshape(64, 32), scales.reshape(64, 2)
    kept = torch.from_numpy(values[:, 8:16]).bfloat16()
    assert np.array_equal(rows[:, 8:24].reshape(-1), raw(kept))
    for number, at in enumerate((0, 16)):
        alone, own = convert(
            layout("float32", head_dim=8),
            np.ascontiguousarray(values[:, at : at + 8]).view(np.uint8).reshape(-1),
            None,
            layout(dtype, "vector", 8),
        )
        assert own is not None
        there = 0 if at == 0 else 24
        assert np.array_equal(rows[:, there : there + 8].reshape(-1), alone)
        assert np.array_equal(each[:, number], own)
    back, _ = convert(latents, stored, scales, plain)
    assert np.array_equal(back.view(np.float32).reshape(64, 24)[:, 8:16], kept.float().numpy())
    again, same = convert(latents, stored, scales, latents)
    assert same is not None
    assert np.array_equal(again, stored)
    assert np.allclose(same, scales, rtol=1e-6)

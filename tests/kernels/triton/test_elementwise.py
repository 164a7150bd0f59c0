"""Norms, gated activations and rotations against the reference operations."""

import numpy as np
import pytest
import torch

from kernels.ops import AttentionMeta, ScaledKV
from kernels.rounding import Rounding, as_floats
from kernels.torch import reference
from kernels.triton import activation, norm, rope
from kernels.triton.quantise import round_to

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [(3, 24), (1, 5000), (2, 3, 128), (5, 1, 72)]
QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def quantised_like(got: torch.Tensor, scales: torch.Tensor, want: torch.Tensor) -> None:
    """Within half a step of what the row's largest magnitude allows: of an integer, or of e4m3's three mantissa bits (a whole
    step in the interpreter, which truncates)."""
    largest = QUANTISED[got.dtype]
    part, least = (8, 2**-8) if got.device.type == "cpu" else (16, 2**-10)
    torch.testing.assert_close(scales, want.abs().amax(-1) / largest, rtol=2e-2, atol=0)
    step = (
        0.51 * scales[..., None] if got.dtype == torch.int8 else want.abs() / part + scales[..., None] * least
    )
    assert ((got.float() * scales[..., None] - want).abs() <= step).all()
    assert got.float().abs().amax(-1).ge(0.9 * largest).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape, dtype=dtype, device=device), torch.randn(shape[-1], device=device)
    close(norm.rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3), dtype)


def test_rms_norm_of_some_of_a_projections_heads(device: torch.device) -> None:
    qkv, weight = torch.randn(5, 7, 16, device=device), torch.randn(16, device=device)
    got = norm.rms_norm(qkv[:, 2:5], weight, 1e-6)
    close(got, reference.rms_norm(qkv[:, 2:5], weight, 1e-6), torch.float32)
    assert got.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_added_in_its_own_precision(device: torch.device, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(6, 40, dtype=dtype, device=device) for _ in range(2))
    weight, want = torch.randn(40, device=device), x + residual
    got = norm.add_rms_norm(x, residual, weight, 1e-5)
    truncated = device.type == "cpu" and dtype == torch.bfloat16
    torch.testing.assert_close(residual, want, rtol=2**-7 if truncated else 0, atol=0)
    close(got, reference.rms_norm(want, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_rounded(device: torch.device, dtype: torch.dtype, with_residual: bool) -> None:
    x, weight = torch.randn(5, 200, device=device), torch.randn(200, device=device)
    residual = torch.randn(5, 200, device=device) if with_residual else None
    total = x if residual is None else x + residual
    got_total, got = norm.norm_rounded(x, residual, weight, 1e-5, Rounding(dtype))
    torch.testing.assert_close(got_total, total, rtol=0, atol=0)
    quantised_like(got.values, got.scales, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("size", [7, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(device: torch.device, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2 * size, dtype=dtype, device=device) * 2
    close(activation.silu_mul(x), reference.silu_mul(x.float()), dtype)
    close(activation.gelu_tanh_mul(x), reference.gelu_tanh_mul(x.float()), dtype)
    assert activation.silu_mul(x[:0]).shape == (0, size)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_gated_activations_rounded(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(4, 2 * 90, device=device) * 2
    for gate, want in (("silu", reference.silu_mul(x)), ("gelu_tanh", reference.gelu_tanh_mul(x))):
        got = activation.gated_rounded(x, gate, Rounding(dtype))
        quantised_like(got.values, got.scales, want)


def test_a_row_of_zeros_is_rounded_to_zeros(device: torch.device) -> None:
    got = activation.gated_rounded(torch.zeros(2, 8, device=device), "silu", Rounding(torch.int8))
    assert not got.values.any()
    assert got.scales.eq(1).all()


@pytest.mark.parametrize(("group", "given"), [(0, False), (128, False), (0, True)])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_rounding_in_one_go_is_rounding_behind(
    device: torch.device, dtype: torch.dtype, given: bool, group: int
) -> None:
    """A row of 384 fills no power of two. What is halfway between two numbers may become either."""
    scale = torch.tensor([0.02], device=device) if given else None
    how, rows = Rounding(dtype, group, scale), 5
    x, wide = torch.randn(rows, 384, device=device), torch.randn(rows, 768, device=device) * 3
    residual, weight = torch.randn(rows, 384, device=device), torch.randn(384, device=device)
    pairs = [
        (norm.norm_rounded(x, residual.clone(), weight, 1e-5, how)[1], reference.norm_rounded(x, residual, weight, 1e-5, how)[1]),
        (norm.norm_rounded(x, None, weight, 1e-5, how)[1], reference.norm_rounded(x, None, weight, 1e-5, how)[1]),
        (activation.gated_rounded(wide, "silu", how), reference.gated_rounded(wide, "silu", how)),
        (round_to(x, how), reference.round_to(x, how)),
    ]  # fmt: skip
    for got, want in pairs:
        assert got.scales.shape == want.scales.shape == ((rows, 3) if group else (1 if given else rows,))
        torch.testing.assert_close(got.scales, want.scales, rtol=1e-5, atol=0)
        torch.testing.assert_close(
            as_floats(got), as_floats(want), rtol=0.13, atol=1.01 * got.scales.max().item()
        )
        assert (got.values.float() != want.values.float()).float().mean() < 0.01
        assert got.dtype == torch.float32
    assert len(activation.gated_rounded(wide[:0], "silu", how).values) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 24, 128])
def test_rope(device: torch.device, size: int, dtype: torch.dtype) -> None:
    qkv, cos, sin = projection(device, 5, 6, size, dtype)
    heads = qkv.view(5, 6, size)[:, 1:4]
    close(rope.rope(heads, cos, sin), reference.rope(heads, cos, sin), dtype)


def projection(
    device: torch.device, num_tokens: int, heads: int, size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angles = torch.randn(num_tokens, size // 2, device=device) * 3
    angles = torch.cat((angles, angles), -1)
    qkv = torch.randn(num_tokens, heads * size, dtype=dtype, device=device)
    return qkv, angles.cos().to(dtype), angles.sin().to(dtype)


def meta_for(slots: torch.Tensor) -> AttentionMeta:
    count = len(slots)
    return AttentionMeta.build([count], [count], [np.zeros(1, np.int64)], slots.cpu().numpy(), slots.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 24), (5, 5, 128)])
def test_rotation_and_kv_write_in_one(
    device: torch.device, heads: int, kv_heads: int, size: int, with_norms: bool, dtype: torch.dtype
) -> None:
    qkv, cos, sin = projection(device, 4, heads + 2 * kv_heads, size, dtype)
    slots = torch.tensor([9, 2, 0, 7], device=device)
    weights = torch.rand(2, size, device=device) + 0.5
    pool = torch.randn(3, 2, kv_heads, 4, size, device=device).to(dtype)
    want_pool = pool.clone()
    q, k, v = qkv.view(4, -1, size).float().split([heads, kv_heads, kv_heads], 1)
    if with_norms:
        q, k = reference.rms_norm(q, weights[0], 1e-5), reference.rms_norm(k, weights[1], 1e-5)
    k = reference.rope(k, cos.float(), sin.float()).to(dtype)
    reference.write_kv(k, v.to(dtype), want_pool, meta_for(slots))
    norms = (weights[0], weights[1], 1e-5) if with_norms else None
    got = rope.rope_and_write_kv(qkv, cos, sin, slots, pool, heads, norms=norms)
    close(got, reference.rope(q, cos.float(), sin.float()), dtype)
    close(pool, want_pool, dtype)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_kv_has_one_scale_for_each_vector(device: torch.device, dtype: torch.dtype) -> None:
    qkv, cos, sin = projection(device, 4, 3 + 2 * 2, 16, torch.float32)
    slots = torch.tensor([11, 2, 0, 5], device=device)
    pool = torch.zeros(3, 2, 2, 4, 16, dtype=dtype, device=device)
    scales = torch.zeros(3, 2, 2, 4, device=device)
    exact, plain = torch.zeros(3, 2, 2, 4, 16, device=device), torch.zeros(3, 2, 2, 4, 16, device=device)
    rope.rope_and_write_kv(qkv, cos, sin, slots, exact, 3)
    rope.rope_and_write_kv(qkv, cos, sin, slots, ScaledKV(pool, scales), 3)
    written = exact.ne(plain).any(-1)
    assert written.sum() == 4 * 2 * 2
    quantised_like(pool[written], scales[written], exact[written])
    assert not scales[~written].any()

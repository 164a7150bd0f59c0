"""What is kept of GGUF's blocks are the weights that `gguf` makes of them, whatever bits they have."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kernels.packed import FourBit, Int8Groups, as_float
from models.files.gguf_reader import BYTES, kept_bytes
from models.formats.gguf_blocks import BLOCK_TYPES, BlockType, matrix_of

ROUNDED = {"Q2_K", "Q3_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K", "Q6_K", "IQ4_XS"}
"""The types of whose weights a scale or a zero point is rounded to float16."""
CPU = frozenset(("int8_groups", "four_bit"))
HALVES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S"), (0,)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
}
"""Where a block has numbers of float16."""


def with_halves(name: str, blocks: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """Blocks (N, blocks, bytes) whose float16 scales and minima are `halves` (N, blocks, 2)."""
    made = blocks.copy()
    for number, at in enumerate(HALVES.get(name, ())):
        made[..., at : at + 2] = halves[..., number : number + 1].astype(np.float16).view(np.uint8)
    return made


def weights(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks.reshape(len(blocks), -1), gguf.GGMLQuantizationType[name])


def kept(name: str, blocks: np.ndarray) -> FourBit | Int8Groups | None:
    count = blocks.shape[1] * BLOCK_TYPES[name].inputs
    return matrix_of(BLOCK_TYPES[name], blocks.reshape(len(blocks), -1), [slice(0, count)])


def most(name: str, matrix: FourBit | Int8Groups) -> torch.Tensor:
    """A thousandth of the largest weight that each group's scale and zero point could make, or of the largest minimum."""
    kind = BLOCK_TYPES[name]
    if isinstance(matrix, FourBit):
        scales, zeros = (each.float().mT for each in matrix.scales.unbind(-1))
    else:
        scales = matrix.scales.float()
        zeros = torch.zeros_like(scales) if matrix.zeros is None else matrix.zeros.float()
    largest = 15 if kind.bits == 4 else 31 if kind.has_minima else 127
    return (scales.abs() * (largest + zeros.abs()) / 1024).repeat_interleave(kind.group, 1)


def check(name: str, blocks: np.ndarray) -> None:
    matrix, want = kept(name, blocks), torch.from_numpy(weights(name, blocks))
    assert matrix is not None
    off = (as_float(matrix, torch.float32) - want).abs()
    if name in ROUNDED:
        assert (off <= most(name, matrix)).all(), (off / most(name, matrix)).max()
    else:
        torch.testing.assert_close(as_float(matrix, torch.float32), want, rtol=1e-6, atol=0)


@st.composite
def some_blocks(draw: st.DrawFn, kind: BlockType) -> tuple[np.ndarray, np.ndarray]:
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    fill = st.integers(0, 255)
    blocks = draw(arrays.arrays(np.uint8, (*shape, kind.size), elements=fill, fill=fill))
    numbers = st.floats(-8, 8, width=16) | st.floats(-(2**-10), 2**-10, width=16) | st.just(0)
    return blocks, draw(arrays.arrays(np.float16, (*shape, 2), elements=numbers))


@pytest.mark.parametrize("name", BLOCK_TYPES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_bits_mean_what_gguf_says(name: str, data: st.DataObject) -> None:
    blocks, halves = data.draw(some_blocks(BLOCK_TYPES[name]))
    if name == "IQ1_M":
        blocks[..., 55] = blocks[..., 55] & 15 | 32  # the upper four bits of a scale
    if name == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 250
    check(name, with_halves(name, blocks, halves))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_usual_weights_are_off_by_a_thousandth_of_their_groups_largest(name: str) -> None:
    rng = np.random.default_rng(0)
    kind = BLOCK_TYPES[name]
    blocks = rng.integers(0, 256, (64, 4, kind.size), dtype=np.uint8)
    if name == "IQ1_M":
        blocks[..., 55] = blocks[..., 55] & 15 | 32
    blocks = with_halves(name, blocks, rng.uniform(1e-4, 2e-4, (64, 4, 2)))
    if name == "MXFP4":
        blocks[..., 0] = 120
    matrix, want = kept(name, blocks), weights(name, blocks).reshape(64, -1, kind.group)
    assert matrix is not None
    off = np.abs(as_float(matrix, torch.float32).numpy().reshape(want.shape) - want)
    assert (off.max(-1) <= np.abs(want).max(-1) * 2e-3).all()
    assert off.mean() <= np.abs(want).mean() * (3e-4 if name in ROUNDED else 1e-7)


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q5_K"])
def test_groups_of_which_only_the_minimum_is_left_are_that(name: str) -> None:
    kind, rng = BLOCK_TYPES[name], np.random.default_rng(1)
    blocks = rng.integers(0, 256, (5, 2, kind.size), dtype=np.uint8)
    for scale in (0.0, 1e-7, -1e-7):
        halves = np.broadcast_to(np.array([scale, 0.25]), (5, 2, 2))
        found = kept(name, with_halves(name, blocks, halves))
        assert found is not None
        want = torch.from_numpy(weights(name, with_halves(name, blocks, halves)))
        assert want.abs().max() > 1
        torch.testing.assert_close(as_float(found, torch.float32), want, rtol=1e-3, atol=1e-4)


def test_scales_that_float16_does_not_hold_are_left_to_floats() -> None:
    blocks = np.full((2, 1, 144), 255, np.uint8)
    assert kept("Q4_K", with_halves("Q4_K", blocks, np.full((2, 1, 2), 6e4))) is None
    assert kept("Q4_K", with_halves("Q4_K", blocks, np.full((2, 1, 2), np.nan))) is None


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_columns_are_cut_between_groups(name: str) -> None:
    kind, rng = BLOCK_TYPES[name], np.random.default_rng(2)
    blocks = rng.integers(0, 256, (3, 512 // kind.inputs, kind.size), dtype=np.uint8)
    blocks = with_halves(name, blocks, rng.uniform(1e-4, 2e-4, (*blocks.shape[:2], 2)))
    if name == "MXFP4":
        blocks[..., 0] %= 250
    if name == "IQ1_M":
        blocks[..., 55] = blocks[..., 55] & 15 | 32
    whole, group = kept(name, blocks), kind.group
    runs = [slice(group, 256 + group), slice(512 - group, 512)] if group < 256 else [slice(256, 512)]
    part = matrix_of(kind, blocks.reshape(3, -1), runs)
    assert whole is not None
    assert part is not None
    want = torch.cat([as_float(whole, torch.float32)[:, run] for run in runs], 1)
    assert torch.equal(as_float(part, torch.float32), want)


def test_memory_is_planned_with_the_bytes_that_are_kept() -> None:
    for name, kind in BLOCK_TYPES.items():
        per_scale = kind.scales.itemsize + (2 if kind.has_minima else 0)
        assert BYTES[name] == kind.bits / 8 + per_scale / kind.group
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.inputs, kind.size)
    assert set(BYTES) == {*BLOCK_TYPES, "F32", "F16", "BF16"}


def test_unlike_matrices_that_become_one_are_counted_so() -> None:
    like = {
        f"blk.0.{name}.weight": ("Q4_K", 100)
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down")
    }
    assert kept_bytes(like) == BYTES["Q4_K"]
    assert kept_bytes(like | {"blk.0.ffn_down.weight": ("Q6_K", 100)}) == pytest.approx(
        (5 * 0.625 + 1.125) / 6
    )
    assert kept_bytes(like | {"blk.0.attn_v.weight": ("Q6_K", 100)}) == pytest.approx(
        (3 * 0.625 + 3 * 1.375) / 6
    )
    assert kept_bytes(like | {"blk.1.attn_v.weight": ("Q6_K", 100)}) == pytest.approx((6 * 0.625 + 1.125) / 7)


def test_gpus_keep_those_of_four_bits_whose_zero_points_are_whole() -> None:
    kept_there = {name for name, kind in BLOCK_TYPES.items() if kind.needs <= {"four_bit"}}
    assert kept_there == {"Q4_0", "Q3_K", "TQ1_0", "TQ2_0"}
    assert all(kind.needs <= CPU for kind in BLOCK_TYPES.values())

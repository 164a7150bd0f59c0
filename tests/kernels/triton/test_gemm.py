"""Quantised and grouped products against the same product in float64."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from kernels.ops import ExpertWeights, Gate, GatedBlock
from kernels.packed import EightBit, FourBit, as_float, on_device
from kernels.rounding import Activations
from kernels.torch import reference
from kernels.triton import gemm
from kernels.triton.gemm_few import MOST_ROWS, linear_few, takes
from kernels.triton.gemm_scaled import linear_scaled
from kernels.triton.grouped import add_lora, group_rows
from kernels.triton.weights import experts, feed_forward, linear
from tests.kernels.triton.places import need_equal_places

SHAPES = [(1, 40, 128), (37, 100, 400), (90, 33, 256)]


def eight_bit(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.randn(shape) * 30
    return values.clamp(-127, 127).round().to(dtype) if dtype == torch.int8 else values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("for_all", [True, False])
def test_scaled(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, for_all: bool) -> None:
    rows, size, inner = shape
    x, weight = eight_bit(dtype, rows, inner).to(device), eight_bit(dtype, size, inner).to(device)
    x_scales, scales = (torch.rand(1 if for_all else n, device=device) * 0.1 for n in (rows, size))
    bias = torch.randn(size, device=device)
    want = (x.double() * x_scales.double()[:, None]) @ (weight.double() * scales.double()[:, None]).T + bias
    got = linear_scaled(x, weight, x_scales, scales, torch.float32, bias)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3 * want.abs().max().item())


@pytest.mark.parametrize("shape", [(1, 40, 128), (37, 300, 384)])
def test_scaled_by_blocks(device: torch.device, shape: tuple[int, int, int]) -> None:
    rows, size, inner = shape
    dtype = torch.float8_e4m3fn
    x, weight = eight_bit(dtype, rows, inner).to(device), eight_bit(dtype, size, inner).to(device)
    x_scales = torch.rand(rows, inner // 128, device=device)
    scales = torch.rand(-(-size // 128), inner // 128, device=device)
    wide = scales.double().repeat_interleave(128, 0)[:size].repeat_interleave(128, 1)
    want = (x.double() * x_scales.double().repeat_interleave(128, 1)) @ (weight.double() * wide).T
    got = linear_scaled(x, weight, x_scales, scales, torch.float32)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3 * want.abs().max().item())


def four_bit(*shape: int, group: int, is_float: bool) -> FourBit:
    """A weight of `shape` (.., outputs, inputs) with any bits. Floats in groups of 16 are NVFP4."""
    *rest, size, inner = shape
    words = torch.randint(-(1 << 15), 1 << 15, (*rest, -(-inner // 128), size, 32), dtype=torch.int16)
    if is_float and group == 16:
        scales = torch.randint(0, 127, (*rest, -(-inner // 128), size, 8), dtype=torch.uint8)
        factors = torch.rand(*rest, size) * 0.01
        return FourBit(words=words, scales=scales, group=group, inputs=inner, factors=factors)
    if is_float:
        scales = torch.randint(118, 130, (*rest, -(-inner // 128), size, 4), dtype=torch.uint8)
    else:
        each = (*rest, -(-inner // group), size)
        scales = torch.stack((torch.rand(each), torch.randint(0, 17, each).float()), -1)
    return FourBit(words=words, scales=scales, group=group, inputs=inner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inner", "group", "is_float"),
    [
        (5, 256, 32, True),
        (5, 256, 16, True),
        (70, 208, 16, True),
        (5, 256, 32, False),
        (3, 224, 16, False),
        (1, 96, 64, False),
        (70, 128, 128, False),
        (5, 320, 384, False),
    ],
)
def test_four_bit(
    device: torch.device, rows: int, inner: int, group: int, is_float: bool, dtype: torch.dtype
) -> None:
    weight = four_bit(40, inner, group=group, is_float=is_float)
    x, bias = torch.randn(rows, inner, dtype=dtype), torch.randn(40, dtype=dtype)
    want = x.double() @ as_float(weight, torch.float64).T + bias.double()
    got = linear(x.to(device), on_device(weight, device), bias.to(device))
    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    largest = want.abs().max().item()
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance * largest)


def by_rows_or_blocks(dtype: torch.dtype, *shape: int, blockwise: bool) -> EightBit:
    """A weight of `shape` (.., outputs, inputs) with any numbers."""
    *rest, size, inner = shape
    each = (*rest, -(-size // 128), inner // 128) if blockwise else (*rest, size)
    return EightBit(eight_bit(dtype, *shape), torch.rand(each) * 0.1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("blockwise", [False, True])
def test_activations_are_rounded_to_a_step_of_their_row_or_block(
    device: torch.device, blockwise: bool, dtype: torch.dtype
) -> None:
    if blockwise and dtype == torch.int8:
        pytest.skip("blocks are float8's")
    weight = by_rows_or_blocks(dtype, 40, 256, blockwise=blockwise)
    x = torch.randn(9, 256)
    x[3] = 0.0
    parts = x.unflatten(1, (-1, 128 if blockwise else 256))
    scales = parts.abs().amax(-1, keepdim=True).clamp_min(1e-9) / (127 if dtype == torch.int8 else 448)
    rounded = (parts / scales).round() if dtype == torch.int8 else (parts / scales).to(dtype).float()
    want = (rounded * scales).flatten(1) @ as_float(weight, torch.float32).T
    got = linear(x.to(device), on_device(weight, device), None).cpu()
    assert not got[3].any()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


PACKED = {
    "int8": lambda *shape: by_rows_or_blocks(torch.int8, *shape, blockwise=False),
    "float8": lambda *shape: by_rows_or_blocks(torch.float8_e4m3fn, *shape, blockwise=False),
    "float8 by blocks": lambda *shape: by_rows_or_blocks(torch.float8_e4m3fn, *shape, blockwise=True),
    "four bits": lambda *shape: four_bit(*shape, group=64, is_float=False),
    "MXFP4": lambda *shape: four_bit(*shape, group=32, is_float=True),
    "NVFP4": lambda *shape: four_bit(*shape, group=16, is_float=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_experts(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """The inner size of 4-bit kinds ends in the midst of 128 inputs."""
    rows, count, hidden, inner = 11, 3, 128, 128 if "blocks" in kind else 96
    x, weights = torch.randn(rows, hidden, dtype=dtype), torch.rand(rows, 2)
    slots = torch.stack([torch.randperm(count + 1)[:2] - 1 for _ in range(rows)])
    bias = torch.randn(count, 2 * inner, dtype=dtype)
    gate_up, down = PACKED[kind](count, 2 * inner, hidden), PACKED[kind](count, hidden, inner)
    wide = ExpertWeights(as_float(gate_up, torch.float32), as_float(down, torch.float32), bias.float())
    want = reference.reference_ops().experts(x.float(), slots, weights, wide, reference.silu_mul)
    there = ExpertWeights(on_device(gate_up, device), on_device(down, device), bias.to(device))
    got = experts(x.to(device), slots.to(device), weights.to(device), there, reference.silu_mul).cpu().float()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max().item())
    packed = ExpertWeights(gate_up, down, bias.float())
    again = reference.reference_ops().experts(x.float(), slots, weights, packed, reference.silu_mul)
    torch.testing.assert_close(again, want)


@pytest.mark.parametrize(("rows", "held", "has_bias"), [(1, 3, True), (25, 5, False), (40, 1, True)])
def test_experts(device: torch.device, rows: int, held: int, has_bias: bool) -> None:
    hidden, inner, width = 24, 20, 2
    x, weights = torch.randn(rows, hidden, device=device), torch.rand(rows, width, device=device)
    slots = torch.stack([torch.randperm(held + 1)[:width] - 1 for _ in range(rows)]).to(device)
    bias = torch.randn(held, 2 * inner, device=device) if has_bias else None
    parts = ExpertWeights(
        torch.randn(held, 2 * inner, hidden, device=device),
        torch.randn(held, hidden, inner, device=device),
        bias,
    )
    want = reference.reference_ops().experts(x, slots, weights, parts, reference.silu_mul)
    torch.testing.assert_close(
        experts(x, slots, weights, parts, reference.silu_mul), want, atol=1e-3, rtol=1e-4
    )


@pytest.mark.parametrize(("num_pairs", "num_groups"), [(1, 1), (40, 7), (5000, 3)])
def test_pairs_are_sorted_by_their_group(device: torch.device, num_pairs: int, num_groups: int) -> None:
    of_pair = torch.randint(-1, num_groups, (num_pairs,))
    got = group_rows(of_pair.to(device), num_groups)
    starts = torch.bincount(of_pair + 1, minlength=num_groups + 1).cumsum(0)
    assert got.starts.tolist() == starts.tolist()
    assert got.order[starts[0] :].tolist() == of_pair.argsort(stable=True)[starts[0] :].tolist()


def test_no_row_has_an_expert(device: torch.device) -> None:
    held = ExpertWeights(torch.randn(2, 8, 16, device=device), torch.randn(2, 16, 4, device=device))
    x, slots = torch.randn(3, 16, device=device), torch.full((3, 2), -1, device=device)
    assert not experts(x, slots, torch.rand(3, 2, device=device), held, reference.silu_mul).any()


@pytest.mark.parametrize("rank", [4, 16])
def test_adapters(device: torch.device, rank: int) -> None:
    rows, inner, size, count = 23, 40, 50, 3
    shrink, expand = (
        torch.randn(count, rank, inner, device=device),
        torch.randn(count, size, rank, device=device),
    )
    x, out = torch.randn(rows, inner, device=device), torch.randn(rows, size, device=device)
    adapters = torch.randint(-1, count, (rows,), device=device)
    want = out.clone()
    for row, adapter in product(range(rows), range(count)):
        if adapters[row] == adapter:
            want[row] += F.linear(F.linear(x[row], shrink[adapter]), expand[adapter])
    add_lora(out, x, shrink, expand, adapters)
    torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_among_few_rows_and_among_many(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Compiled: in tiles of other sizes."""
    rows, size = (1024, 4400) if device.type == "cuda" else (40, 70)
    x, weight = (torch.randn(n, 200, dtype=dtype, device=device) for n in (rows, size))
    many = gemm.linear(x, weight, None)
    torch.testing.assert_close(many.double(), x.double() @ weight.double().T, rtol=1e-2, atol=0.2)
    need_equal_places()
    assert torch.equal(gemm.linear(x[7:20], weight, None), many[7:20])
    assert torch.equal(gemm.batched_linear(x[:3, None], weight[None])[:, 0], many[:3])


FEW = torch.bfloat16 if torch.cuda.is_available() else torch.float32
"""What is multiplied where few rows are: the interpreter has no arithmetic of 16 bits."""


@pytest.mark.parametrize("rows", [1, 2, 7, MOST_ROWS])
@pytest.mark.parametrize("size", [48, 70])
def test_few_rows(device: torch.device, rows: int, size: int) -> None:
    inner = 512
    x, weight = (torch.randn(n, inner, dtype=FEW, device=device) for n in (rows, size))
    bias = torch.randn(size, dtype=FEW, device=device)
    want = x.double() @ weight.double().T
    for given in (None, bias):
        got = linear_few(x, weight, given)
        torch.testing.assert_close(
            got.double(), want if given is None else want + bias.double(), rtol=1e-2, atol=0.1
        )
    wide = torch.randn(rows, 2 * inner, dtype=FEW, device=device)[:, :inner]
    torch.testing.assert_close(
        linear_few(wide, weight, None).double(), wide.double() @ weight.double().T, rtol=1e-2, atol=0.1
    )


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS + 1])
def test_a_gate_behind_few_rows_is_that_of_the_operations_one_by_one(
    device: torch.device, gate: Gate, rows: int
) -> None:
    inner, size = 512, 70
    x = torch.randn(rows, inner, dtype=FEW, device=device)
    gate_up = torch.randn(2 * size, inner, dtype=FEW, device=device) * inner**-0.5
    bias, down = (
        torch.randn(2 * size, dtype=FEW, device=device),
        torch.randn(48, size, dtype=FEW, device=device),
    )
    one_by_one = reference.silu_mul if gate == "silu" else reference.gelu_tanh_mul

    def in_order(x: Activations) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return linear(one_by_one(linear(x, gate_up, bias)), down, None)

    block = GatedBlock(gate_up=gate_up, gate_up_bias=bias, gate=gate, down=down)
    got = feed_forward(block, in_order)(x)
    # 70 products of numbers that may differ by their last bit are added up.
    torch.testing.assert_close(got, in_order(x), rtol=1e-2, atol=0.2)


def test_what_few_rows_are_not_for_is_left_to_pytorch(device: torch.device) -> None:
    x, weight = torch.randn(3, 512, dtype=FEW, device=device), torch.randn(8, 512, dtype=FEW, device=device)
    assert takes(x, weight)
    assert not takes(torch.randn(MOST_ROWS + 1, 512, dtype=FEW, device=device), weight)
    assert not takes(x[:0], weight)
    assert not takes(x.double(), weight)
    assert not takes(x, weight.T.contiguous().T)
    assert not takes(x[:, :500], weight[:, :500].contiguous())

"""Quantised and grouped products against the same product in float64."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from kernels import ref
from kernels.ops import ExpertWeights
from kernels.packing import FourBit, unpack
from kernels.triton.gemm_four_bit import linear_four_bit
from kernels.triton.gemm_scaled import linear_scaled
from kernels.triton.grouped import add_lora, experts

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


def four_bit(size: int, inner: int, group: int, *, is_float: bool) -> FourBit:
    words = torch.randint(-(1 << 31), 1 << 31, (inner // 8, size), dtype=torch.int64).to(torch.int32)
    shape = (inner // group, size)
    if is_float:
        return FourBit(words, torch.randint(118, 130, shape, dtype=torch.uint8), None, group)
    return FourBit(words, torch.rand(shape), torch.randint(0, 17, shape, dtype=torch.uint8), group)


def on(device: torch.device, weight: FourBit) -> FourBit:
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    return FourBit(weight.words.to(device), weight.scales.to(device), zeros, weight.group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "group", "is_float"),
    [(5, 32, True), (5, 32, False), (1, 64, False), (70, 128, False), (5, 256, False)],
)
def test_four_bit(device: torch.device, rows: int, group: int, is_float: bool, dtype: torch.dtype) -> None:
    weight = four_bit(40, 256, group, is_float=is_float)
    x, bias = torch.randn(rows, 256, dtype=dtype), torch.randn(40, dtype=dtype)
    want = x.double() @ unpack(weight).double().T + bias.double()
    got = linear_four_bit(x.to(device), on(device, weight), bias.to(device))
    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    largest = want.abs().max().item()
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance * largest)


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
    want = ref.reference_ops().experts(x, slots, weights, parts, ref.silu_mul)
    torch.testing.assert_close(experts(x, slots, weights, parts, ref.silu_mul), want, atol=1e-3, rtol=1e-4)


def test_no_row_has_an_expert(device: torch.device) -> None:
    held = ExpertWeights(torch.randn(2, 8, 16, device=device), torch.randn(2, 16, 4, device=device))
    x, slots = torch.randn(3, 16, device=device), torch.full((3, 2), -1, device=device)
    assert not experts(x, slots, torch.rand(3, 2, device=device), held, ref.silu_mul).any()


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

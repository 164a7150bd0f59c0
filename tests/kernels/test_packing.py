"""4-bit weights packed as checkpoints have them, here by their formats' definitions, mean the same in our layout."""

import pytest
import torch

from kernels.packed import EightBit, FourBit, Int8Groups, Weight, as_float, joined, one_of, reordered, stacked
from kernels.packing import from_awq, from_compressed, from_gptq, from_mxfp4, from_nibbles, from_nvfp4

K, N, GROUP = 256, 24, 64


@pytest.fixture
def quantised() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(K, N) integers, (K / group, N) zeros and scales, and the (N, K) weight that they mean."""
    values, zeros = torch.randint(0, 16, (K, N)), torch.randint(1, 16, (K // GROUP, N))
    scales = torch.rand(K // GROUP, N)
    whole = (values - zeros.repeat_interleave(GROUP, 0)) * scales.repeat_interleave(GROUP, 0)
    return values, zeros, scales, whole.T


def packed(values: list[torch.Tensor]) -> torch.Tensor:
    """Eight tensors of nibbles, from the lowest bits up, as one of int32."""
    word = sum((value.long() << 4 * i for i, value in enumerate(values)), torch.zeros((), dtype=torch.long))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def test_awq(quantised: tuple[torch.Tensor, ...]) -> None:
    values, zeros, scales, want = quantised

    def pack(x: torch.Tensor) -> torch.Tensor:
        return packed([x[:, column::8] for column in (0, 2, 4, 6, 1, 3, 5, 7)])

    torch.testing.assert_close(floats(from_awq(pack(values), pack(zeros), scales, GROUP)), want)


@pytest.mark.parametrize("offset", [0, 1])
def test_gptq(quantised: tuple[torch.Tensor, ...], offset: int) -> None:
    values, zeros, scales, want = quantised
    qweight = packed([values[row::8] for row in range(8)])
    qzeros = packed([(zeros - offset)[:, column::8] for column in range(8)])
    torch.testing.assert_close(floats(from_gptq(qweight, qzeros, scales, GROUP, offset)), want)


def test_mxfp4() -> None:
    """Against the exponent, mantissa and sign of each number."""
    blocks = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    exponents = torch.randint(100, 140, (N, K // 32), dtype=torch.uint8)
    got = floats(from_mxfp4(blocks, exponents))
    for column, k in ((0, 0), (3, 7), (23, 255), (11, 128), (5, 64)):
        nibble = int(blocks[column, k // 2]) >> (4 * (k % 2)) & 15
        assert got[column, k].item() == e2m1(nibble) * 2.0 ** (int(exponents[column, k // 32]) - 127)


def test_nvfp4() -> None:
    """The same numbers under E4M3's, of which some are subnormal, and under one scale for each output."""
    blocks = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    bits = torch.randint(0, 127, (N, K // 16), dtype=torch.uint8)
    bits[3, 0], factors = 5, torch.rand(N)
    got = floats(from_nvfp4(blocks, bits.view(torch.float8_e4m3fn), factors))
    for column, k in ((0, 0), (3, 7), (23, 255), (11, 128), (5, 64), (6, 17)):
        nibble, byte = int(blocks[column, k // 2]) >> (4 * (k % 2)) & 15, int(bits[column, k // 16])
        number = e2m1(nibble)
        exponent, mantissa = byte >> 3, byte & 7
        scale = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9
        assert got[column, k].item() == pytest.approx(number * scale * factors[column].item(), rel=1e-6)


def e2m1(nibble: int) -> float:
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    number = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
    return (-1) ** sign * number


def floats(weight: FourBit) -> torch.Tensor:
    return as_float(weight, torch.float32)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed(quantised: tuple[torch.Tensor, ...], symmetric: bool) -> None:
    values, zeros, scales, want = quantised
    words = packed([values.T[:, k::8] for k in range(8)])
    if symmetric:
        got = from_compressed(words, None, scales.T, GROUP)
        want = ((values - 8) * scales.repeat_interleave(GROUP, 0)).T
    else:
        zero_points = packed([zeros.T[row::8] for row in range(8)])
        got = from_compressed(words, zero_points, scales.T, GROUP)
    torch.testing.assert_close(floats(got), want)


def test_inputs_that_fill_no_block(quantised: tuple[torch.Tensor, ...]) -> None:
    """96 of K inputs: one and a half groups."""
    values, zeros, scales, want = quantised
    words = packed([values[:96].T[:, k::8] for k in range(8)])
    got = from_compressed(words, packed([zeros[:2].T[row::8] for row in range(8)]), scales[:2].T, GROUP)
    assert got.shape == (N, 96)
    torch.testing.assert_close(floats(got), want[:, :96])


@pytest.mark.parametrize("kind", ["rows", "blocks", "nibbles"])
def test_joined_and_stacked(kind: str) -> None:
    def make(size: int) -> Weight:
        if kind == "nibbles":
            words = torch.randint(-(1 << 15), 1 << 15, (1, size, 32), dtype=torch.int16)
            scales = torch.stack((torch.rand(2, size), torch.randint(0, 16, (2, size)).float()), -1)
            return FourBit(words=words, scales=scales, group=64, inputs=128)
        shape = (-(-size // 128), 1) if kind == "blocks" else (size,)
        return EightBit(torch.randint(-9, 9, (size, 128), dtype=torch.int8), torch.rand(shape))

    for sizes, is_packed in (((128, 256, 40), True), ((40, 128), kind != "blocks")):
        parts = [make(size) for size in sizes]
        whole = joined(parts, torch.float32)
        assert isinstance(whole, torch.Tensor) != is_packed
        assert whole.shape == (sum(sizes), 128)
        want = torch.cat([as_float(part, torch.float32) for part in parts])
        torch.testing.assert_close(as_float(whole, torch.float32), want)
    experts = [make(40) for _ in range(3)]
    several = stacked(experts, torch.float32)
    assert several.shape == (3, 40, 128)
    for index, expert in enumerate(experts):
        got = as_float(one_of(several, index), torch.float32)
        torch.testing.assert_close(got, as_float(expert, torch.float32))
    assert isinstance(joined([parts[0], torch.zeros(1, 128)], torch.bfloat16), torch.Tensor)


def four_bit(size: int, group: int, *, symmetric: bool = False, dtype: torch.dtype = torch.float16) -> Weight:
    nibbles = torch.randint(0, 16, (160, size), dtype=torch.uint8)
    scales = torch.rand(-(-160 // group), size).to(dtype)
    return from_nibbles(nibbles, scales, group, None if symmetric else torch.rand_like(scales) * 15)


def int8_groups(size: int, group: int, *, has_zeros: bool) -> Weight:
    values, scales = (
        torch.randint(-128, 128, (size, 160), dtype=torch.int8),
        torch.rand(size, -(-160 // group)).half(),
    )
    return Int8Groups(values=values, scales=scales, zeros=scales * 9 if has_zeros else None, group=group)


MIXED: dict[str, tuple[list[Weight], type, int, bool]] = {
    "Q4_K and Q6_K": ([four_bit(8, 32), int8_groups(5, 16, has_zeros=False)], Int8Groups, 16, True),
    "Q4_K and Q2_K": ([four_bit(8, 32), four_bit(3, 16)], FourBit, 16, True),
    "Q4_0 and Q4_K": ([four_bit(8, 32, symmetric=True), four_bit(3, 32)], FourBit, 32, True),
    "Q3_K and Q8_0": (
        [four_bit(8, 16, symmetric=True), int8_groups(4, 32, has_zeros=False)],
        Int8Groups,
        16,
        False,
    ),
    "Q5_K and Q6_K": (
        [int8_groups(9, 32, has_zeros=True), int8_groups(4, 16, has_zeros=False)],
        Int8Groups,
        16,
        True,
    ),
    "scales of two dtypes": ([four_bit(8, 32, dtype=torch.float32), four_bit(3, 32)], FourBit, 32, True),
}
"""Matrices, and the layout of all of them: its class, its groups, and whether it has zero points."""


@pytest.mark.parametrize("name", MIXED)
def test_matrices_in_different_groups_are_joined_without_loss(name: str) -> None:
    parts, layout, group, has_zeros = MIXED[name]
    whole = joined(parts, torch.float32)
    assert isinstance(whole, FourBit | Int8Groups)
    assert (type(whole), whole.group) == (layout, group)
    assert has_zeros == (not whole.has_whole_zeros if isinstance(whole, FourBit) else whole.zeros is not None)
    want = torch.cat([as_float(part, torch.float32) for part in parts])
    assert torch.equal(as_float(whole, torch.float32), want)
    order = torch.randperm(len(want))
    assert torch.equal(as_float(reordered(whole, order, torch.float32), torch.float32), want[order])

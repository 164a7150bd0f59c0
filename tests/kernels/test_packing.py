"""4-bit weights packed as checkpoints have them, here by their formats' definitions, mean the same in our layout."""

import pytest
import torch

from kernels.packing import from_awq, from_gptq, from_mxfp4, unpack

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

    torch.testing.assert_close(unpack(from_awq(pack(values), pack(zeros), scales)), want)


@pytest.mark.parametrize("offset", [0, 1])
def test_gptq(quantised: tuple[torch.Tensor, ...], offset: int) -> None:
    values, zeros, scales, want = quantised
    qweight = packed([values[row::8] for row in range(8)])
    qzeros = packed([(zeros - offset)[:, column::8] for column in range(8)])
    torch.testing.assert_close(unpack(from_gptq(qweight, qzeros, scales, offset)), want)


def test_mxfp4() -> None:
    """Against the exponent, mantissa and sign of each number."""
    blocks = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
    exponents = torch.randint(100, 140, (N, K // 32), dtype=torch.uint8)
    got = unpack(from_mxfp4(blocks, exponents))
    for column, k in ((0, 0), (3, 7), (23, 255), (11, 128), (5, 64)):
        nibble = int(blocks[column, k // 2]) >> (4 * (k % 2)) & 15
        sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
        number = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
        want = (-1) ** sign * number * 2.0 ** (int(exponents[column, k // 32]) - 127)
        assert got[column, k].item() == want

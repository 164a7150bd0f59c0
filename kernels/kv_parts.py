"""A layer's keys and values where they are not all of a tensor of floats: of 8 bits, latents of 8 bits, or among the vectors of a
pool that was made for other heads.

A pool's layer has heads of one size. Layers of a model whose heads are wider, or which have fewer, take some of these heads: a
vector that is `width` times as wide as the pool's lies in so many neighbouring heads of it, piece by piece, and behind each
`step` heads of the pool comes the next head of the layer. So a token's vectors lie where the pool has that token's, and what cuts
the pool by its heads, where a multiple of `step` begins, cuts the layer by its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.head_places import HeadPlaces


@dataclass(frozen=True, slots=True)
class ScaledKV:
    """A rank's KV of one layer in 8 bits."""

    data: Tensor
    """(num_blocks, 2, Hkv, block_size, D) float8_e4m3fn or int8"""
    scales: Tensor
    """(num_blocks, 2, Hkv, block_size) float32, to multiply each vector with."""

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


@dataclass(frozen=True, slots=True)
class ScaledLatents:
    """A layer's latents, and index keys behind them, in 8 bits. The rotated part of keys, which is small and decides much, is
    bfloat16, as in DeepSeek's own kernels."""

    data: Tensor
    """(num_blocks, 1, 1, block_size, R + 2 P + I) float8_e4m3fn or int8, of which 2 P are P numbers of bfloat16."""
    scales: Tensor
    """(num_blocks, 1, 1, block_size, groups) float32: all other numbers are of as many groups, which share one each."""
    kept: tuple[int, int]
    """R and R + P: which numbers are bfloat16."""

    @property
    def num_scaled(self) -> int:
        """Return R + I."""
        return self.data.shape[4] - 2 * (self.kept[1] - self.kept[0])

    @property
    def shape(self) -> torch.Size:
        """Return the shape that it would have as floats."""
        *rest, size = self.data.shape
        return torch.Size((*rest, size - self.kept[1] + self.kept[0]))

    def blocks(self, ids: Tensor) -> Tensor:
        """(N,) int64 -> (N, 1, 1, block_size, R + P + I) float32: what is in these blocks."""
        return self._floats(self.data.view(torch.uint8)[ids], self.scales[ids])

    def tokens(self, slots: Tensor) -> Tensor:
        """(..) int64 -> (.., R + P + I) float32: what is at these slots."""
        return self._floats(
            self.data.view(torch.uint8).flatten(0, 3)[slots], self.scales.flatten(0, 3)[slots]
        )

    def _floats(self, stored: Tensor, scales: Tensor) -> Tensor:
        first, last = self.kept[0], 2 * self.kept[1] - self.kept[0]
        numbers = torch.cat((stored[..., :first], stored[..., last:]), -1).view(self.data.dtype).float()
        numbers = (numbers.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)
        kept = stored[..., first:last].contiguous().view(torch.bfloat16).float()
        return torch.cat((numbers[..., :first], kept, numbers[..., first:]), -1)


@dataclass(frozen=True, slots=True)
class KVPart:
    """The KV of a layer that has a part of the pool's heads, each of them as many of the pool's as `width` says."""

    data: Tensor
    """(num_blocks, 2, heads of the pool, block_size, D of the pool)"""
    places: HeadPlaces

    @property
    def shape(self) -> torch.Size:
        """Return the shape that a layer of its own would have."""
        num_blocks, planes, heads, block_size, size = self.data.shape
        places = self.places
        return torch.Size((num_blocks, planes, heads // places.step, block_size, size * places.width))

    @property
    def heads(self) -> Tensor:
        """(heads * width,) int64: the pool's heads that the pieces of its heads are, in their order."""
        firsts = torch.arange(self.places.first, self.data.shape[2], self.places.step)
        return (firsts[:, None] + torch.arange(self.places.width)).flatten()

    def blocks(self, ids: Tensor) -> Tensor:
        """(N,) int64 -> (N, 2, heads, block_size, D): what is in these blocks, copied."""
        pieces = self.data[ids][:, :, self.heads.to(self.data.device)]
        return whole_vectors(pieces.unflatten(2, (-1, self.places.width)))


def whole_vectors(pieces: Tensor) -> Tensor:
    """(.., heads, width, tokens, D of the pool) -> (.., heads, tokens, D): pieces of vectors joined."""
    return pieces.transpose(-3, -2).flatten(-2)

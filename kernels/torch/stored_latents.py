"""Latents as floats or in 8 bits, in pure PyTorch: how they are stored and read.

Rounded as device.convert does, so that a block holds the same whether it was computed in 8 bits or handed over in more."""

import torch
from torch import Tensor

from kernels.ops import AttentionMeta, Latents
from kernels.rounding import rounded


def write_latent(latent: Tensor, kv_layer: Latents, meta: AttentionMeta) -> None:
    """`Ops.write_latent`. A layer without index keys leaves the room behind its latents as it is."""
    if isinstance(kv_layer, Tensor):
        vectors = kv_layer.view(-1, kv_layer.shape[-1])[:, : latent.shape[-1]]
        vectors.index_copy_(0, meta.slots, latent)
        return
    first, end = kv_layer.kept
    numbers = torch.cat((latent[:, :first], latent[:, end:]), 1)
    group = kv_layer.num_scaled // kv_layer.scales.shape[4]
    stored, scales = rounded(numbers.reshape(-1, group), kv_layer.data.dtype)
    stored, scales = stored.view(torch.uint8).view(numbers.shape), scales.view(len(latent), -1)
    kept = latent[:, first:end].to(torch.bfloat16).view(torch.uint8)
    row = torch.cat((stored[:, :first], kept, stored[:, first:]), 1)
    kv_layer.data.view(torch.uint8).flatten(0, 3)[:, : row.shape[1]].index_copy_(0, meta.slots, row)
    kv_layer.scales.flatten(0, 3)[:, : scales.shape[1]].index_copy_(0, meta.slots, scales)


def blocks_of(kv_layer: Latents, ids: Tensor, part: slice) -> Tensor:
    """(N,) int64 -> (N, 1, 1, block_size, part): a part of the numbers in these blocks, in float32 where they have 8 bits."""
    if isinstance(kv_layer, Tensor):
        return kv_layer[..., part][ids]
    return kv_layer.blocks(ids)[..., part]


def tokens_of(kv_layer: Latents, slots: Tensor, size: int) -> Tensor:
    """(..) int64 -> (.., size): the first numbers at these slots, in float32 where they have 8 bits."""
    if isinstance(kv_layer, Tensor):
        return kv_layer.flatten(0, 3)[:, :size][slots]
    return kv_layer.tokens(slots)[..., :size]

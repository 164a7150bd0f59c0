"""KV of 8 bits with a scale for each vector, in pure PyTorch: how it is stored and what it means.

Rounded as device.convert does, so that a block holds the same whether it was computed in 8 bits or handed over in more."""

import torch
from torch import Tensor

from kernels.kv_parts import ScaledKV, ScaledLatents
from kernels.ops import AttentionMeta
from kernels.rounding import rounded

_NOT_HERE = "latents have operations of their own"


def store_vectors(vectors: Tensor, kv_layer: Tensor | ScaledKV | ScaledLatents, rows: Tensor) -> None:
    """Store `vectors` (N, D) at `rows` (N,) int64 of the layer's vectors, in their order."""
    assert not isinstance(kv_layer, ScaledLatents), _NOT_HERE
    size = vectors.shape[1]
    if isinstance(kv_layer, Tensor):
        kv_layer.view(-1, size).index_copy_(0, rows, vectors.to(kv_layer.dtype))
        return
    stored, scales = rounded(vectors, kv_layer.data.dtype)
    kv_layer.data.view(torch.uint8).view(-1, size).index_copy_(0, rows, stored.view(torch.uint8))
    kv_layer.scales.view(-1).index_copy_(0, rows, scales)


def as_floats(
    kv_layer: Tensor | ScaledKV | ScaledLatents, meta: AttentionMeta, dtype: torch.dtype
) -> tuple[Tensor, AttentionMeta]:
    """Return a layer of 8 bits in `dtype`, with only the blocks that a step attends to, and the step with their numbers there."""
    assert not isinstance(kv_layer, ScaledLatents), _NOT_HERE
    if isinstance(kv_layer, Tensor):
        return kv_layer, meta
    if (found := meta.cache.get("blocks of 8 bits")) is None:
        found = meta.cache["blocks of 8 bits"] = _compact(meta, kv_layer)
    blocks, compact = found
    data = kv_layer.data.view(torch.uint8)[blocks].view(kv_layer.data.dtype)
    return (data.float() * kv_layer.scales[blocks][..., None]).to(dtype), compact


def _compact(meta: AttentionMeta, kv_layer: ScaledKV) -> tuple[Tensor, AttentionMeta]:
    block_size = kv_layer.shape[3]
    tables = [
        table[: -(-context // block_size)]
        for table, context in zip(meta.block_tables, meta.context_lens, strict=True)
    ]
    used, places = torch.unique(torch.cat(tables), return_inverse=True)
    own = places.split([len(table) for table in tables])
    compact = AttentionMeta(
        query_starts=meta.query_starts,
        query_lens=meta.query_lens,
        context_lens=meta.context_lens,
        block_tables=own,
        slots=meta.slots,
        both_ways=meta.both_ways,
    )
    return used.to(kv_layer.data.device), compact

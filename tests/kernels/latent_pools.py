"""Pools of latents in 8 bits, and the same latents as floats."""

from dataclasses import dataclass

import torch
from torch import Tensor

from core.kv import KVLayout, KVShard
from engine.execution.pools.kv_pool import layers_of, pool_parts
from kernels.kv_parts import ScaledLatents
from kernels.ops import AttentionMeta
from kernels.torch.stored_latents import write_latent

KINDS = ("float8_e4m3fn", "int8")


@dataclass(frozen=True, slots=True)
class StoredPool:
    stored: ScaledLatents
    floats: Tensor
    """(num_blocks, 1, 1, block_size, R + P + I) float32: what `stored` means."""


def stored_pool(pool: Tensor, kind: str, kept: tuple[int, int], group: int) -> StoredPool:
    """(num_blocks, 1, 1, block_size, R + P + I) -> the same in 8 bits."""
    num_blocks, _, _, block_size, size = pool.shape
    layout = KVLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=size,
        block_size=block_size,
        dtype=kind,
        state="mla",
        scales="vector",
        group=group,
        kept=kept,
    )
    shard = KVShard.whole(layout)
    flat = torch.full((shard.pool_bytes(num_blocks),), 0xFF, dtype=torch.uint8, device=pool.device)
    (stored,) = layers_of(shard, pool_parts(shard, num_blocks, flat))
    assert isinstance(stored, ScaledLatents)
    slots = torch.arange(num_blocks * block_size, device=pool.device)
    write_latent(pool.flatten(0, 3), stored, AttentionMeta.over([len(slots)], [len(slots)], (), slots))
    return StoredPool(stored, stored.blocks(torch.arange(num_blocks, device=pool.device)))

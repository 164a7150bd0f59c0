"""One rank's KV cache: per-layer tensors over one contiguous buffer, in core.kv's layout."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from core.kv import KVShard
from core.plan import BlockCopy

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Pool(Protocol):
    """The KV that a runner computes on, and what it must say of it."""

    @property
    def layers(self) -> list[Tensor]:
        """Each (num_blocks, planes, heads, block_size, head_dim), on the device that computes."""
        ...

    @property
    def is_mirrored(self) -> bool:
        """`arrived` and `written` are to be called."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the leading slots of blocks, in all layers."""
        ...

    def arrived(self, blocks: Tensor) -> None:
        """(N,) int64: blocks about to be read whose bytes others may have put into the buffer."""
        ...

    def written(self, layer: int, slots: Tensor) -> None:
        """(T,) int64: block * block_size + offset of tokens whose K and V the device has written in the pool's layer `layer`."""
        ...

    def synchronise(self) -> None:
        """Returns when what was `written` is in the buffer."""
        ...


class KVPool:
    """Computed on where it lies. The buffer may be shared with other processes."""

    is_mirrored = False

    def __init__(self, shard: KVShard, num_blocks: int, buffer: memoryview) -> None:
        self.layers: list[Tensor] = list(pool_tensor(shard, num_blocks, buffer).unbind(0))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            for layer in self.layers:
                layer[copy.dst, :, :, : copy.num_tokens] = layer[copy.src, :, :, : copy.num_tokens]

    def arrived(self, blocks: Tensor) -> None:
        """Nothing to do."""

    def written(self, layer: int, slots: Tensor) -> None:
        """Nothing to do."""

    def synchronise(self) -> None:
        """Nothing to do."""


def pool_tensor(shard: KVShard, num_blocks: int, buffer: memoryview) -> Tensor:
    """(layers, num_blocks, planes, heads, block_size, head_dim) over the beginning of `buffer`."""
    layout = shard.layout
    shape = (
        shard.num_layers,
        num_blocks,
        layout.num_planes,
        shard.num_heads,
        layout.block_size,
        layout.head_dim,
    )
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=shard.pool_bytes(num_blocks))
    return flat.view(TORCH_DTYPES[layout.dtype]).view(shape)

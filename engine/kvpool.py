"""One rank's KV cache: per-layer tensors over one contiguous buffer, in core.kv's layout."""

from collections.abc import Sequence

import torch

from core.kv import KVShard
from core.plan import BlockCopy

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVPool:
    """`layers[l]` is (num_blocks, planes, heads, block_size, head_dim). The buffer may be shared with other processes."""

    def __init__(self, shard: KVShard, num_blocks: int, buffer: memoryview, device: torch.device) -> None:
        shape = (
            shard.num_layers,
            num_blocks,
            shard.layout.num_planes,
            shard.num_heads,
            shard.layout.block_size,
            shard.layout.head_dim,
        )
        dtype = TORCH_DTYPES[shard.layout.dtype]
        size = shard.pool_bytes(num_blocks)
        host = torch.frombuffer(buffer, dtype=torch.uint8, count=size).view(dtype).view(shape)
        self.layers: list[torch.Tensor] = list((host if device.type == "cpu" else host.to(device)).unbind(0))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the leading slots of blocks, in all layers."""
        for copy in copies:
            for layer in self.layers:
                layer[copy.dst, :, :, : copy.num_tokens] = layer[copy.src, :, :, : copy.num_tokens]

"""One rank's KV cache: per-layer tensors over one contiguous buffer, in core.kv's layout."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from core.kv import KVShard
from core.plan import BlockCopy, StepPlan
from kernels.kv_parts import ScaledLatents
from kernels.ops import KVLayer, ScaledKV

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class DevicePool(Protocol):
    """The KV that a runner computes on. The runner tells it which blocks it reads and writes."""

    @property
    def layers(self) -> list[KVLayer]:
        """Each (num_blocks, planes, heads, block_size, head_dim), on the device that computes."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_told(self) -> bool:
        """Whether `written` is to be called."""
        ...

    def begin(self, plan: StepPlan) -> None:
        """Make the device wait for what the step must not overtake. Comes before the step's first touch of the pool."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the leading slots of blocks, in all layers."""
        ...

    def written(self, layer: int, slots: Tensor) -> None:
        """Take note of (T,) int64 slots (block * block_size + offset) whose K and V the device has written in the pool's
        `layer`."""
        ...

    def finish(self) -> None:
        """Wait until all work of the step is done."""
        ...


class KVPool:
    """A pool that is computed on where it lies. The buffer may be shared with other processes."""

    is_told = False

    def __init__(self, shard: KVShard, num_blocks: int, buffer: memoryview) -> None:
        self._parts = pool_parts(shard, num_blocks, bytes_of(shard, num_blocks, buffer))
        self.layers = layers_of(shard, self._parts)
        self.device = torch.device("cpu")

    def begin(self, plan: StepPlan) -> None:
        """Do nothing."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        copy_slots(self._parts, copies)

    def written(self, layer: int, slots: Tensor) -> None:
        """Do nothing: the buffer is the pool."""

    def finish(self) -> None:
        """Do nothing."""


def bytes_of(shard: KVShard, num_blocks: int, buffer: memoryview) -> Tensor:
    """Return (pool bytes,) uint8 over the beginning of `buffer`."""
    return torch.frombuffer(buffer, dtype=torch.uint8, count=shard.pool_bytes(num_blocks))


def pool_parts(shard: KVShard, num_blocks: int, flat: Tensor) -> tuple[Tensor, ...]:
    """Return views of `flat`, which begins with a pool's bytes: the vectors (layers, num_blocks, planes, heads, block_size,
    head_dim) and, where there are any, their scales without head_dim, or with as many as a vector has. Vectors of 8 bits are
    uint8, which all operations know; each of their numbers that is kept in 16 bits takes two."""
    layout = shard.layout
    shape = (shard.num_layers, num_blocks, layout.num_planes, shard.num_heads, layout.block_size)
    at, dtype = shard.data_bytes(num_blocks), TORCH_DTYPES[layout.dtype]
    stored = torch.uint8 if dtype.itemsize == 1 else dtype
    data = flat[:at].view(stored).view(*shape, layout.vector_bytes // dtype.itemsize)
    if not layout.num_scales:
        return (data,)
    scales = flat[at : shard.pool_bytes(num_blocks)].view(torch.float32)
    return data, scales.view(*shape, layout.num_scales) if layout.group else scales.view(shape)


def copy_slots(parts: Sequence[Tensor], copies: Sequence[BlockCopy]) -> None:
    """Copy the leading slots of blocks in a pool's parts. Whole blocks go at once: a recurrent state has hundreds. No block is
    one copy's source and another's destination."""
    if not copies:
        return
    size, device = parts[0].shape[4], parts[0].device
    whole = [copy for copy in copies if copy.num_tokens == size]
    if whole:
        sources, destinations = (
            torch.tensor(blocks, device=device)
            for blocks in ([copy.src for copy in whole], [copy.dst for copy in whole])
        )
        for part in parts:
            part[:, destinations] = part[:, sources]
    for copy in copies:
        if copy.num_tokens < size:
            for part in parts:
                part[:, copy.dst, :, :, : copy.num_tokens] = part[:, copy.src, :, :, : copy.num_tokens]


def layers_of(shard: KVShard, parts: Sequence[Tensor]) -> list[KVLayer]:
    data = parts[0].view(TORCH_DTYPES[shard.layout.dtype])
    if len(parts) == 1:
        return list(data.unbind(0))
    layers = zip(data.unbind(0), parts[1].unbind(0), strict=True)
    if shard.layout.group:
        return [ScaledLatents(*layer, shard.layout.kept) for layer in layers]
    return [ScaledKV(*layer) for layer in layers]

"""A KV pool in a GPU's memory, with a copy in host memory that transports and lower tiers read and write.

Invariant: when a step ends, the host's copy has what the device has written in it. So the host's copy of any block is always
whole and may be brought to the device again. The GPU itself moves the bytes, through a mapping of the host's memory. Each vector
that is written crosses the bus once, and so does a block that is first read after others may have filled it."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from core.kv import KVShard
from core.plan import BlockCopy, StepPlan
from device.array_interface import CudaBytes
from engine.execution.pools.kv_pool import bytes_of, copy_slots, layers_of, pool_parts


class MirroredPool:
    """An engine.execution.pools.kv_pool.DevicePool in two memories. They are separate on a CPU too, which is how it is tested."""

    is_told = True

    def __init__(self, shard: KVShard, num_blocks: int, buffer: memoryview, device: torch.device) -> None:
        host = bytes_of(shard, num_blocks, buffer)
        flat = _seen_by(device, host)
        if device.type == "cuda":
            # With the pool, and before the buffer can be unmapped: what is mapped there later could not be locked again.
            weakref.finalize(self, _unlock, host).atexit = False
        self._host = pool_parts(shard, num_blocks, flat)
        own = torch.zeros(shard.pool_bytes(num_blocks + 1), dtype=flat.dtype, device=device)
        self._pool = pool_parts(shard, num_blocks + 1, own)
        self.empty_block = num_blocks
        """One block behind all others, in the device's memory alone. No sequence gets it: rows that only fill up a step write
        there."""
        self._block_size = shard.layout.block_size
        self.device = device
        self.layers = layers_of(shard, self._pool)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        copy_slots(self._host, copies)
        copy_slots(self._pool, copies)

    def arrived(self, blocks: Tensor) -> None:
        ids = blocks.to(self.device)
        for host, pool in zip(self._host, self._pool, strict=True):
            pool[:, ids] = host[:, ids]

    def written(self, layer: int, slots: Tensor) -> None:
        block, offset = slots // self._block_size, slots % self._block_size
        for host, pool in zip(self._host, self._pool, strict=True):
            host[layer][block, :, :, offset] = pool[layer][block, :, :, offset]

    def written_in_all(self, slots: Tensor) -> None:
        """Take note of `written` slots in all layers at once."""
        block, offset = slots // self._block_size, slots % self._block_size
        for host, pool in zip(self._host, self._pool, strict=True):
            host[:, block, :, :, offset] = pool[:, block, :, :, offset]

    def begin(self, plan: StepPlan) -> None:
        """Do nothing: the copy is the host's, and nobody else touches the device's memory."""

    def hand_over(self) -> None:
        # Transports of this instance run in another process and read the copy: it must be whole before they are told.
        self._wait()

    def finish(self) -> None:
        # The step's result lets the instance read the copy.
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            # Without cupy there is no event that a thread could ask in the host's place (device/cuda.py).
            torch.cuda.current_stream(self.device).synchronize()


def _unlock(host: Tensor) -> None:
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(host.data_ptr())


def _seen_by(device: torch.device, host: Tensor) -> Tensor:
    """Return the bytes of `host` as a tensor of `device`. Pages are locked and mapped at the same addresses. Raises
    ConfigError."""
    if device.type == "cpu":
        return host
    address, num_bytes = host.data_ptr(), host.nbytes
    cudart: Any = torch.cuda.cudart()
    failure = int(cudart.cudaHostRegister(address, num_bytes, 0))
    if failure:
        raise ConfigError(
            f"CUDA could not lock the KV pool's {num_bytes} bytes of host memory (error {failure}): raise the limit of locked "
            "memory (ulimit -l), or lower engine.kv_bytes"
        )
    return torch.as_tensor(CudaBytes(address, num_bytes), device=device)

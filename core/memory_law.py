"""The memory law: what a rank needs beside its KV pool, and how much of its device is left for the pool.

The engine sizes its pools by it, `baton doctor` judges nodes by it, `baton plan` and the simulator size modelled GPUs by it."""

from dataclasses import dataclass

from core.errors import ConfigError

GPU_RESERVE_BYTES = 2 << 30
"""CUDA's context, workspaces of libraries, captured graphs, NCCL's buffers and fragmentation. An assumption: no GPU has been
asked yet."""
HOST_KV_SHARE = 0.5
"""The share that a pool takes of the host memory that is left for it. The other half is the page cache's."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One GPU's memory, or a host's."""

    name: str
    total_bytes: int
    free_bytes: int
    is_host: bool

    def budget_bytes(self, utilization: float, num_sharers: int) -> int:
        """What one of `num_sharers` ranks may use: of a GPU its share of the whole, of a host its share of what is free."""
        if self.is_host:
            return int(self.free_bytes * utilization) // num_sharers
        return min(int(self.total_bytes * utilization) // num_sharers, self.free_bytes) - GPU_RESERVE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeeds:
    """What one rank needs beside its KV pool, in bytes."""

    weight_bytes: int
    step_bytes: int
    """Live tensors of the largest step."""

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.step_bytes


def kv_room(memory: DeviceMemory, needs: RankNeeds, utilization: float, num_sharers: int = 1) -> int:
    """Bytes for a pool whose size nobody has said; 0 where the needs alone do not fit."""
    left = memory.budget_bytes(utilization, num_sharers) - needs.num_bytes
    return max(0, int(left * HOST_KV_SHARE) if memory.is_host else left)


def check_fit(
    memory: DeviceMemory, needs: RankNeeds, kv_bytes: int, utilization: float, num_sharers: int = 1
) -> None:
    """Raises ConfigError, with all numbers, where weights, the largest step and a pool of `kv_bytes` are more than there is."""
    budget = memory.budget_bytes(1.0 if memory.is_host else utilization, num_sharers)
    if needs.num_bytes + kv_bytes <= budget:
        return
    raise ConfigError(
        f"does not fit {memory.name}: {_gib(needs.weight_bytes)} of weights, {_gib(needs.step_bytes)} for the largest step and "
        f"{_gib(kv_bytes)} of KV are more than {_gib(budget)}, {_of_what(memory, utilization, num_sharers)}. "
        "Use more tensor-parallel ranks, a larger device or quantised weights"
        + ("; or lower engine.kv_bytes or engine.max_batch_tokens" if kv_bytes else "")
    )


def _of_what(memory: DeviceMemory, utilization: float, num_sharers: int) -> str:
    shared = f" among {num_sharers}" if num_sharers > 1 else ""
    if memory.is_host:
        return f"its free memory{shared}"
    return (
        f"which is {utilization:g} of its {_gib(memory.total_bytes)}{shared} (engine.memory_utilization) but for "
        f"{_gib(GPU_RESERVE_BYTES)} that CUDA keeps, with {_gib(memory.free_bytes)} free"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"

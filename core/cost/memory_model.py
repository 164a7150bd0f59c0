"""The memory model: what a rank needs beside its KV pool, and how much of its device is left for the pool.

The engine sizes its pools by it, `baton doctor` judges nodes by it, `baton plan` and the simulator size modelled GPUs by it."""

from dataclasses import dataclass

from core.errors import ConfigError

GPU_RESERVE_BYTES = 2 << 30
"""CUDA's context, workspaces of libraries, captured graphs, NCCL's buffers and fragmentation. On an H200 one rank has 0.8 GiB
beside its tensors, with 23 captures (`benchmarks/results/gpu_decode_step.json`). NCCL's part is an assumption."""
MEMORY_SERVER_BYTES = 512 << 20
"""CUDA's context of another process on the same GPU, which hands a rank's KV over. This is an assumption, too."""
HOST_KV_SHARE = 0.5
"""The share that a pool takes of the host memory that is left for it. The other half is for the page cache."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The number of ranks among which a device's memory is shared evenly."""

    num_ranks: int = 1
    """Ranks of this instance and of others. The others may have taken their shares already, or may never start."""
    num_together: int = 1
    """Ranks of this instance, which start together: what is free is for all of them."""
    card_share: float = 1.0
    """The part of a GPU that is this instance's, where an instance of another role has the rest of it."""
    num_alike: int = 1
    """The number among `num_ranks` that have one copy of their weights in memory."""


ALONE = Sharing()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One GPU's memory, or a host's."""

    name: str
    total_bytes: int
    free_bytes: int
    is_host: bool

    def budget_bytes(self, utilization: float, sharing: Sharing, counted_by_others: int = 0) -> int:
        """Return what one rank may use: its share of the whole, as far as that is free. `counted_by_others` are bytes that it
        uses and that are part of others' shares. A host takes them to be free: they are mapped from files."""
        share = (
            int(self.total_bytes * utilization * sharing.card_share) // sharing.num_ranks + counted_by_others
        )
        if self.is_host:
            return min(share, int(self.free_bytes * utilization) // sharing.num_together)
        return min(share, self.free_bytes) - GPU_RESERVE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNeeds:
    """What one rank needs beside its KV pool, in bytes."""

    weight_bytes: int
    step_bytes: int
    """Live tensors of the largest step."""

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.step_bytes


def kv_room(memory: DeviceMemory, needs: RankNeeds, utilization: float, sharing: Sharing = ALONE) -> int:
    """Return the bytes for a pool whose size is not configured; 0 where the needs alone do not fit."""
    counted_by_others = needs.weight_bytes - needs.weight_bytes // sharing.num_alike
    left = memory.budget_bytes(utilization, sharing, counted_by_others) - needs.num_bytes
    return max(0, int(left * HOST_KV_SHARE) if memory.is_host else left)


def check_fit(
    memory: DeviceMemory, needs: RankNeeds, kv_bytes: int, utilization: float, sharing: Sharing = ALONE
) -> None:
    """Raise ConfigError, with all numbers, where weights, the largest step and a pool of `kv_bytes` are more than there is; on a
    host, more than what is free, whatever the rank's share of it."""
    free = memory.free_bytes // sharing.num_together
    budget = free if memory.is_host else memory.budget_bytes(utilization, sharing)
    if needs.num_bytes + kv_bytes <= budget:
        return
    raise ConfigError(
        f"does not fit {memory.name}: {gib(needs.weight_bytes)} of weights, {gib(needs.step_bytes)} for the largest step and "
        f"{gib(kv_bytes)} of KV are more than {gib(budget)}, {_of_what(memory, utilization, sharing)}. "
        + ("Use a larger gpu_share, " if sharing.card_share < 1 else "Use more tensor-parallel ranks, ")
        + "a larger device or quantised weights"
        + ("; or lower engine.kv_bytes or engine.max_batch_tokens" if kv_bytes else "")
    )


def _of_what(memory: DeviceMemory, utilization: float, sharing: Sharing) -> str:
    if memory.is_host:
        among = f" among {sharing.num_together} ranks" if sharing.num_together > 1 else ""
        return f"its free memory{among}"
    among = f" among {sharing.num_ranks}" if sharing.num_ranks > 1 else ""
    shared = (
        f", of which this instance has {sharing.card_share:g} (gpu_share)," if sharing.card_share < 1 else ""
    )
    return (
        f"which is {utilization:g} of its {gib(memory.total_bytes)}{among} (engine.memory_utilization){shared} but for "
        f"{gib(GPU_RESERVE_BYTES)} that CUDA keeps, with {gib(memory.free_bytes)} free"
    )


def gib(num_bytes: int) -> str:
    """Return a size for people."""
    return f"{num_bytes / 2**30:.2f} GiB"

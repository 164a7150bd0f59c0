"""Host memory that a Kubernetes pod of instances needs. Pools are sized as the engine does it; no weight is read.

A limit below this floor ends the pod by the kernel's hand, while it loads or on its first long prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.preflight.findings import Finding, Verdict
from core.config.cluster_config import ClusterConfig, EngineConfig
from core.config.draft_config import engine_of_role
from core.config.parallel_config import ParallelConfig
from core.config.pools import Pool, PoolName, pools_of
from core.config.residency_groups import Colocation
from core.cost.memory_model import DeviceMemory, gib
from core.errors import ConfigError
from core.kv import num_blocks_for
from engine.sizing.devices import host_memory
from engine.sizing.model_dims import mesh_of
from engine.sizing.pool_size import PoolSize, RankMemory, size_pool
from models.files.hub import describe

GIB = 1 << 30
NODE_BYTES = GIB
"""Ray's raylet and agents, its object store (256 MiB), and what is on /dev/shm besides pools."""
PROCESS_BYTES = GIB // 2
"""An instance's process, and each rank's on a CPU, beside weights and KV. One with the embedded model has 0.29 GiB."""
GPU_PROCESS_BYTES = 4 * GIB
"""The same of a rank on a GPU: CUDA's libraries and pinned buffers. An assumption."""
_ENDLESS_BYTES = 1 << 50
_PROCESSES, _RAY = "of processes", "for Ray"


@dataclass(frozen=True, slots=True)
class PodMemory:
    """By what takes it, in bytes."""

    parts: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def num_gib(self) -> int:
        """Return the whole GiB that a limit should have."""
        return math.ceil(self.num_bytes / GIB)

    def __str__(self) -> str:
        return ", ".join(f"{gib(size)} {what}" for what, size in self.parts if size)


def pod_memory(config: ClusterConfig, pools: Sequence[Pool], num_each: int, *, on_gpus: bool) -> PodMemory:
    """Return what a pod needs that has `num_each` instances of each of `pools`. A pool without `engine.kv_bytes` has at least the
    KV of one whole context. Raises ConfigError where the model cannot be described."""
    folder = describe(config.model.path)
    meshes = [mesh_of(pool.parallel) for pool in pools]
    parts = [
        _instance(config, folder, pool, num_alike=num_each * meshes.count(mesh), on_gpus=on_gpus)
        for pool, mesh in zip(pools, meshes, strict=True)
    ]
    sums = {what: sum(dict(part)[what] for part in parts) * num_each for what, _ in parts[0]}
    return PodMemory((*sums.items(), (_RAY, NODE_BYTES)))


def memory_of(models: Colocation, pools: Sequence[PoolName], num_each: int, *, on_gpus: bool) -> PodMemory:
    """Return what a pod needs that has `num_each` instances of each of `pools`: of one model, or of each model of a group. Raises
    ConfigError where a model cannot be described."""
    needed = [
        pod_memory(row, [pool for pool in pools_of(row) if pool.name in pools], num_each, on_gpus=on_gpus)
        for row in models.rows
    ]
    if len(needed) == 1:
        return needed[0]
    kept = [_kept_asleep(row, pools, on_gpus=on_gpus) * num_each for row in models.rows]
    processes = [dict(each.parts)[_PROCESSES] for each in needed]
    awake = [each.num_bytes - NODE_BYTES - own for each, own in zip(needed, processes, strict=True)]
    more = sorted(max(0, all_of - least) for all_of, least in zip(awake, kept, strict=True))
    # Instances of one rank are in one process, and others' ranks have a process each, also while they sleep.
    shared = all(pool.parallel.num_ranks == 1 for pool in pools_of(models.first) if pool.name in pools)
    return PodMemory(
        (
            ("of models that sleep", sum(kept)),
            ("more of those that are awake", sum(more[-models.awake_models :])),
            (_PROCESSES, max(processes) if shared else sum(processes)),
            (_RAY, NODE_BYTES),
        )
    )


def _kept_asleep(row: ClusterConfig, pools: Sequence[PoolName], *, on_gpus: bool) -> int:
    """Return the host memory that an instance of each of `pools` keeps while it sleeps."""
    residency, total = row.schedule.residency, 0
    for pool in pools_of(row):
        if pool.name not in pools:
            continue
        if residency.keeps_kv:
            total += row.engine.host_cache_bytes
        if residency.level == 1:
            size = _size(
                row, engine_of_role(row.engine, pool.name), describe(row.model.path), pool, on_gpus=on_gpus
            )
            total += sum(need.weight_bytes for need in size.needs) // pool.parallel.hosts
    return total


def check_pod(
    where: str, models: Colocation, pools: Sequence[PoolName], num_each: int, *, on_gpus: bool
) -> Finding:
    """Compare this pod's limit with what its instances need. The arguments are as in `memory_of`."""
    names = " and ".join(pools)
    try:
        needed = memory_of(models, pools, num_each, on_gpus=on_gpus)
    except ConfigError as error:
        return Finding(where=where, check="pod memory", verdict=Verdict.SKIP, measured=str(error))
    limit = host_memory().total_bytes
    enough = limit >= needed.num_bytes
    return Finding(
        where=where,
        check="pod memory",
        verdict=Verdict.OK if enough else Verdict.FAIL,
        measured=f"the pod may use {gib(limit)}",
        expected=f"{gib(needed.num_bytes)} for {num_each} x {names}: {needed}",
        fix=""
        if enough
        else f"give the {names} pods a memory request and limit of {needed.num_gib}Gi (`baton pods` prints them), or lower "
        "engine.kv_bytes, engine.host_cache_bytes or engine.max_batch_tokens",
    )


def _instance(
    config: ClusterConfig, folder: Path, pool: Pool, *, num_alike: int, on_gpus: bool
) -> list[tuple[str, int]]:
    """Return what one instance takes of each pod that it is on. `num_alike` instances there have their weights cut alike: they
    have one copy of them if the configuration names a folder for it."""
    parallel, engine = pool.parallel, engine_of_role(config.engine, pool.name)
    size = _size(config, engine, folder, pool, on_gpus=on_gpus)
    num_here = -(-parallel.num_ranks // parallel.hosts)
    weights = 0 if on_gpus else sum(need.weight_bytes for need in size.needs)
    if config.model.packed_cache not in ("auto", "none"):  # `auto` stores none in a pod
        weights = -(-weights // num_alike)
    steps = 0 if on_gpus else sum(need.step_bytes for need in size.needs)
    kv_bytes = 0 if on_gpus else size.num_bytes
    if not on_gpus and not (engine.kv_bytes or engine.num_blocks):
        # Of what memory_utilization leaves beside weights and steps, a pool on a CPU takes half.
        needs = weights + steps
        kv_bytes = math.ceil((needs + 2 * kv_bytes) / engine.memory_utilization) - needs
    own = PROCESS_BYTES * (parallel.num_ranks > 1)
    each = GPU_PROCESS_BYTES if on_gpus else PROCESS_BYTES
    return [
        ("of weights", weights // parallel.hosts),
        ("for the largest step", steps // parallel.hosts),
        ("for KV", kv_bytes // parallel.hosts),
        ("for host_cache_bytes", config.engine.host_cache_bytes),
        (_PROCESSES, own + each * num_here),
    ]


def _size(
    config: ClusterConfig, engine: EngineConfig, folder: Path, pool: Pool, *, on_gpus: bool
) -> PoolSize:
    """Size the pool. Where the configuration leaves its size open, it has room for one whole context."""
    size = _sized(config, engine, folder, pool, on_gpus=on_gpus)
    if engine.kv_bytes or engine.num_blocks:
        return size
    own = size.shard.layout.state_blocks + num_blocks_for(size.max_context_tokens, engine.block_size)
    least = engine.model_copy(update={"num_blocks": (own + 2) * pool.parallel.dp})
    return _sized(config, least, folder, pool, on_gpus=on_gpus)


def _sized(
    config: ClusterConfig, engine: EngineConfig, folder: Path, pool: Pool, *, on_gpus: bool
) -> PoolSize:
    parallel: ParallelConfig = pool.parallel
    memory = DeviceMemory(
        name="a pod", total_bytes=_ENDLESS_BYTES, free_bytes=_ENDLESS_BYTES, is_host=not on_gpus
    )
    return size_pool(
        folder,
        config.model,
        engine,
        mesh_of(parallel),
        role=pool.name,
        num_spare=parallel.ep_redundant_experts,
        device=torch.device("cuda" if on_gpus else "cpu"),
        found=RankMemory(devices=(memory,) * parallel.num_ranks),
        slots=config.adapters,
    )

"""What memory an instance's ranks find where they are started, and how many others share it."""

import shutil
from dataclasses import replace
from pathlib import Path

from cluster.instance.instance_parts import Role
from core.config.cluster_config import ClusterConfig
from core.config.parallel_config import ParallelConfig
from core.config.pools import pools_of
from core.cost.memory_model import MEMORY_SERVER_BYTES, DeviceMemory
from core.errors import ConfigError
from engine.ranks.rank import Spawner
from engine.sizing.devices import (
    choose_device,
    host_cpus,
    host_gpus,
    memory_of,
)
from engine.sizing.model_dims import mesh_of
from engine.sizing.pool_size import RankMemory

_SHARED_MEMORY = Path("/dev/shm")


def memory_in_process(config: ClusterConfig, parallel: ParallelConfig, spawner: Spawner | None) -> RankMemory:
    """Return the memory where all instances of the configuration are in this process, on the same devices. Raises
    ConfigError."""
    if spawner is not None and not spawner.memory[0].is_host:
        _check_nobody_reads(config)
    if parallel.shares_card:
        raise ConfigError(
            f"gpu_share is {parallel.gpu_share:g}: instances within one process have no shares of their own of its card: "
            "serve without --local"
        )
    num_ranks = sum(pool.num_ranks for pool in pools_of(config))
    return _found(config, parallel, spawner, num_on_host=num_ranks, num_in_process=num_ranks)


def _check_nobody_reads(config: ClusterConfig) -> None:
    """Raise ConfigError where others would read the pools of several ranks on GPUs. In one process only the ranks reach them."""
    engine = config.engine
    readers = [name for name in ("host_cache_bytes", "disk_cache_bytes") if getattr(engine, name)]
    reader = f"engine.{readers[0]}" if readers else ""
    if (num := sum(pool.num_instances for pool in pools_of(config))) > 1:
        reader = f"a hand-over among {num} instances"
    if reader:
        raise ConfigError(
            f"{reader} needs memory servers where an instance has several GPUs, and one process has none: serve without --local, "
            "or have one instance without lower tiers (prefill_instances 0, decode_instances 1)"
        )


def memory_of_replica(
    config: ClusterConfig,
    role: Role,
    parallel: ParallelConfig,
    spawner: Spawner | None,
    *,
    num_instances: int = 0,
) -> RankMemory:
    """Return the memory where the instance has its process, and its GPUs, for itself. As many others may be beside it as the host
    has processors and GPUs for. Several ranks on GPUs have a memory server each. `num_instances` are those that share this host,
    or pod, where whoever places them says so; 0: nobody does."""
    memories = spawner.memories if spawner else ()
    own = max(map(memories.count, memories)) if memories else -(-parallel.num_ranks // parallel.hosts)
    with_room = [
        sum(pool.num_ranks for pool in pools_of(config)),
        int(host_cpus() / config.cpus_per_instance),
    ]
    if num_gpus := host_gpus():
        with_room.append(num_gpus)
    if num_instances:
        with_room.append(num_instances * own)
    on_host = max(own, min(with_room))
    found = _found(config, parallel, spawner, num_on_host=on_host, num_in_process=1)
    if found.on_device and parallel.num_ranks > 1:
        return replace(found, devices=tuple(_without_server(device) for device in found.devices))
    if role == "prefill" or config.transfer.transport not in ("auto", "shm") or found.on_device:
        return found
    # Others write into this pool through /dev/shm, where a container often has little.
    shared, utilization = shutil.disk_usage(_SHARED_MEMORY), config.engine.memory_utilization
    free = int(min(shared.free, shared.total / on_host) * utilization)
    return replace(found, most_pool_bytes=free)


def _found(
    config: ClusterConfig,
    parallel: ParallelConfig,
    spawner: Spawner | None,
    *,
    num_on_host: int,
    num_in_process: int,
) -> RankMemory:
    devices = _devices(config, parallel, spawner)
    if all(device.is_host for device in devices):
        # This instance's host cache comes out of the free memory, the caches of all instances out of the total.
        cached = config.engine.host_cache_bytes
        all_cached = cached * num_on_host // parallel.num_ranks
        left = tuple(_without(device, all_cached, cached) for device in devices)
        # Instances whose weights are cut alike have one copy of them (`model.packed_cache`).
        are_alike = len({mesh_of(pool.parallel) for pool in pools_of(config)}) == 1
        num_alike = max(1, num_on_host // parallel.num_ranks) if are_alike else 1
        return RankMemory(devices=left, num_sharers=num_on_host, num_alike=num_alike)
    return RankMemory(
        devices=devices, num_sharers=num_in_process, on_device=True, card_share=parallel.gpu_share
    )


def _without_server(device: DeviceMemory) -> DeviceMemory:
    return _without(device, MEMORY_SERVER_BYTES, MEMORY_SERVER_BYTES)


def _without(device: DeviceMemory, of_total: int, of_free: int) -> DeviceMemory:
    """Return the memory less what others take of it."""
    return replace(
        device,
        total_bytes=max(0, device.total_bytes - of_total),
        free_bytes=max(0, device.free_bytes - of_free),
    )


def _devices(
    config: ClusterConfig, parallel: ParallelConfig, spawner: Spawner | None
) -> tuple[DeviceMemory, ...]:
    if spawner is not None:
        return spawner.memory
    return (memory_of(choose_device(config.engine.device)),) * parallel.num_ranks

"""What memory an instance's ranks find where they are started, and with how many others they share it."""

import shutil
from dataclasses import replace
from pathlib import Path

from cluster.instance.instance_parts import Role
from core.config import ClusterConfig, ParallelConfig
from core.memory_law import DeviceMemory, Sharing
from engine.execution.devices import choose_device, host_cpus, host_gpus, host_memory, memory_of
from engine.execution.pool_size import RankMemory
from engine.ranks.rank import Spawner

_SHARED_MEMORY = Path("/dev/shm")


def memory_in_process(config: ClusterConfig, parallel: ParallelConfig, spawner: Spawner | None) -> RankMemory:
    """All instances of the configuration are in this process, on the same devices."""
    num_ranks = _num_ranks(config)
    return _found(config, parallel, spawner, num_on_host=num_ranks, num_in_process=num_ranks)


def memory_of_replica(
    config: ClusterConfig, role: Role, parallel: ParallelConfig, spawner: Spawner | None
) -> RankMemory:
    """The instance has its process, and its GPUs, for itself. Of the others as many may be beside it as the host has processors
    and GPUs for."""
    hosts = (
        spawner.memories if spawner and spawner.memories else (0,) * -(-parallel.num_ranks // parallel.hosts)
    )
    own = max(hosts.count(host) for host in hosts)
    with_room = min(_num_ranks(config), int(host_cpus() / config.cpus_per_instance), host_gpus() or 1 << 20)
    on_host = max(own, with_room)
    found = _found(config, parallel, spawner, num_on_host=on_host, num_in_process=1)
    if role == "prefill" or config.transfer.transport not in ("auto", "shm"):
        return found
    # Others write into this pool through /dev/shm, where a container often has little.
    shared, utilization = shutil.disk_usage(_SHARED_MEMORY), config.engine.memory_utilization
    free = int(min(shared.free, shared.total / on_host) * utilization)
    return RankMemory(
        devices=found.devices,
        num_sharers=found.num_sharers,
        most_pool_bytes=free if found.most_pool_bytes is None else min(free, found.most_pool_bytes),
    )


def _num_ranks(config: ClusterConfig) -> int:
    """All ranks of all instances, as the configuration begins."""
    prefill = config.prefill_instances * config.prefill.num_ranks
    return max(1, prefill + config.decode_instances * config.decode.num_ranks)


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
        # The instance's cache comes out of its part of the free memory, all instances' out of the whole.
        cached = config.engine.host_cache_bytes
        all_cached = cached * num_on_host // parallel.num_ranks
        left = tuple(
            replace(
                device,
                total_bytes=max(0, device.total_bytes - all_cached),
                free_bytes=max(0, device.free_bytes - cached),
            )
            for device in devices
        )
        return RankMemory(devices=left, num_sharers=num_on_host)
    # A GPU's pool has a copy in host memory.
    host = host_memory()
    most = host.budget_bytes(config.engine.memory_utilization, Sharing(num_on_host))
    return RankMemory(devices=devices, num_sharers=num_in_process, most_pool_bytes=most)


def _devices(
    config: ClusterConfig, parallel: ParallelConfig, spawner: Spawner | None
) -> tuple[DeviceMemory, ...]:
    if spawner is not None:
        return spawner.memory
    return (memory_of(choose_device(config.engine.device)),) * parallel.num_ranks

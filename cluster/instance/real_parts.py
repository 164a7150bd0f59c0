"""The parts of a real instance on this host: a model's ranks, a pool in memory that the chosen transports can reach."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cluster.instance.device_access import device_access, loopback_access, take_device_memory
from cluster.instance.instance_parts import AsleepParts, InstanceParts, Role
from cluster.instance.kept_parts import KeptParts
from cluster.instance.pool_access import PoolAccess, no_access, remote_access
from cluster.instance.pull_media import device_media
from cluster.instance.rank_memory import memory_in_process, memory_of_replica
from cluster.instance.remote_memory.memory_messages import MemorySetup
from cluster.instance.remote_memory.remote_bytes import NUM_SLOTS, RemoteBytes
from cluster.instance.remote_memory.remote_host import Keep, RemoteHost, start_memories
from cluster.instance.shared_memory import take_memory
from core.config.cluster_config import ClusterConfig
from core.config.draft_config import engine_of_role
from core.config.parallel_config import ParallelConfig
from core.cost.step_profile import first_steps
from core.ports import LayerSink, Mail, WorkerGroup
from core.start_timer import StartTimer
from device.cuda import CudaDevice
from engine.execution.build_group import build_group
from engine.ranks.child_ranks import children
from engine.ranks.rank import Spawner
from engine.ranks.rank_messages import MemoryPlace
from engine.ranks.start_ranks import start_ranks
from engine.sizing.devices import bound_allocations, card_of, choose_device
from engine.sizing.model_dims import mesh_of
from engine.sizing.pool_size import PoolSize, RankMemory, size_pool
from engine.tiers.build_tiers import build_tiers
from engine.tiers.saved_first import SavedFirst
from kernels.cpu.library import native
from kvtransfer.staging import STAGING_BYTES, HostStaging
from kvtransfer.transport.base import Holder, Receiver
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackReceiver, LoopbackSender
from kvtransfer.transport.shm import host_id
from models.families.table import read_spec
from models.files.revision import weights_revision
from net.mail import TcpMail
from parallel.mesh import Mesh

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InstancePlace:
    """What starts an instance's ranks, and the memory servers of its other hosts or of its ranks' GPUs."""

    ranks: Spawner
    keep: Keep | None = None
    """None where there are no other hosts."""
    keep_on_devices: Keep | None = None
    """Starts a memory server on each rank's device, in the ranks' order, before the ranks. None: they compute on CPUs."""


def local_parts(
    config: ClusterConfig,
    folder: Path,
    role: Role,
    mail: Mail,
    fabric: LoopbackFabric,
    kept: KeptParts | None = None,
) -> InstanceParts:
    """Return the parts of an instance that shares its process, and so its memory, with the others. `kept` is what it had before
    it slept."""
    parallel, timer = config.prefill if role == "prefill" else config.decode, StartTimer("sizes")
    kept = kept or KeptParts(config.engine, partial(local_parts, config, folder, role, mail, fabric))
    spawner = children(config.engine, mesh_of(parallel)) if parallel.num_ranks > 1 else None
    if kept.size is None:
        found = memory_in_process(config, parallel, spawner)
        kept.size = _size(config, folder, role, parallel, spawner=spawner, found=found, timer=timer)
    size = kept.size
    timer.begin("pool")
    return _parts(
        config,
        folder,
        size,
        parallel,
        access=_local_access(size, mail.address, fabric, has_ranks=spawner is not None),
        host="process",
        spawner=spawner,
        other_memories=[MemoryPlace(pool.num_bytes) for pool in size.pools] if size.on_device else (),
        timer=timer,
        kept=kept,
    )


def asleep_local_parts(
    config: ClusterConfig, folder: Path, role: Role, mail: Mail, fabric: LoopbackFabric
) -> AsleepParts:
    """Return the same of an instance that begins asleep."""
    return AsleepParts(KeptParts(config.engine, partial(local_parts, config, folder, role, mail, fabric)))


def _local_access(size: PoolSize, address: str, fabric: LoopbackFabric, *, has_ranks: bool) -> PoolAccess:
    """Return the access to the pool within this process. `has_ranks`: they are processes, and where they compute on GPUs nobody
    else reaches their pools."""
    if size.on_device and has_ranks:
        return no_access()
    if size.on_device:
        device_memory = take_device_memory(CudaDevice(0), size.num_bytes)
        return loopback_access(fabric, address, device_memory, size.num_bytes)
    memory, path = take_memory(size.num_bytes + STAGING_BYTES)
    buffer = memory[: size.num_bytes]

    def receivers(holder: Holder) -> list[Receiver]:
        return [LoopbackReceiver(fabric, address, buffer, holder.may_write, holder.arrived)]

    return PoolAccess(
        buffer=buffer,
        make_receivers=receivers,
        make_senders=lambda: [LoopbackSender(fabric, memory)],
        path=path,
        staging=HostStaging(memory, size.num_bytes),
    )


def remote_parts(
    config: ClusterConfig,
    folder: Path,
    role: Role,
    mail: TcpMail,
    key: bytes,
    place: Callable[[Mesh], InstancePlace],
    *,
    timer: StartTimer | None = None,
    num_instances: int = 0,
    kept: KeptParts | None = None,
) -> InstanceParts:
    """Return the parts of an instance in a process of its own, reached by shared memory on this host and by TCP from others.
    `place` starts the ranks of one that has several. `timer` has timed what was before this; None: nothing was. `num_instances`
    as in `memory_of_replica`, `kept` as in `local_parts`."""
    timer = timer or StartTimer("sizes")
    kept = kept or KeptParts(
        config.engine, lambda kept: remote_parts(config, folder, role, mail, key, place, kept=kept)
    )
    timer.begin("sizes")
    parallel = config.prefill if role == "prefill" else config.decode
    placement = place(mesh_of(parallel)) if parallel.num_ranks > 1 else None
    spawner = placement.ranks if placement else None
    if kept.size is None:
        found = memory_of_replica(config, role, parallel, spawner, num_instances=num_instances)
        kept.size = _size(config, folder, role, parallel, spawner=spawner, found=found, timer=timer)
        kept.card = _keep_to_share(config, parallel, found, kept.size) if parallel.shares_card else ""
    size = kept.size
    timer.begin("pool")
    access = _access(config, role, mail, key, size, in_process=placement is None)
    remote = _memory_servers(config, role, mail, size, placement) if placement else ()
    try:
        return _parts(
            config,
            folder,
            size,
            parallel,
            access=access,
            host=host_id(),
            spawner=spawner,
            remote=remote,
            other_memories=[host.memory for host in remote],
            timer=timer,
            kept=kept,
        )
    except BaseException:
        _end(remote)
        raise


def asleep_remote_parts(
    config: ClusterConfig,
    folder: Path,
    role: Role,
    mail: TcpMail,
    key: bytes,
    place: Callable[[Mesh], InstancePlace],
) -> AsleepParts:
    """Return the same of an instance that begins asleep."""
    return AsleepParts(
        KeptParts(config.engine, lambda kept: remote_parts(config, folder, role, mail, key, place, kept=kept))
    )


def _access(
    config: ClusterConfig, role: Role, mail: TcpMail, key: bytes, size: PoolSize, *, in_process: bool
) -> PoolAccess:
    """Return the access to the pool, which is made here unless it lies on GPUs and other processes have those. `in_process`: the
    only rank is in this one."""
    host = mail.address.rpartition(":")[0]
    if not size.on_device:
        return remote_access(
            config.transfer,
            mail.me,
            host,
            receives=role != "prefill",
            key=key,
            num_bytes=size.num_bytes,
            security=config.security,
        )
    if not in_process:
        return no_access()
    device = CudaDevice(0)
    memory = take_device_memory(device, size.num_bytes)
    media = device_media(config.transfer, device)
    return device_access(
        config.transfer,
        mail.me,
        host,
        key=key,
        memory=memory,
        num_bytes=size.num_bytes,
        media=media,
        security=config.security,
    )


def _keep_to_share(config: ClusterConfig, parallel: ParallelConfig, found: RankMemory, size: PoolSize) -> str:
    """Have this process run out of memory before it takes what its card's other instance has, and return which card that is."""
    device, [memory] = choose_device(config.engine.device), found.devices
    share = int(memory.total_bytes * config.engine.memory_utilization * parallel.gpu_share)
    bound_allocations(device, share - (size.num_bytes if size.on_device else 0))
    card, num_processors = card_of(device)
    log.info("this instance shares GPU %s, and CUDA shows it %d of its multiprocessors", card, num_processors)
    return card


def _memory_servers(
    config: ClusterConfig, role: Role, mail: TcpMail, size: PoolSize, placement: InstancePlace
) -> tuple[RemoteHost, ...]:
    """Start what serves the memories that are not this process's."""
    keep, ranks = placement.keep_on_devices if size.on_device else placement.keep, placement.ranks
    if keep is None:
        return ()
    has_tiers = bool(config.engine.host_cache_bytes or config.engine.disk_cache_bytes)
    firsts = {pool.memory: rank for rank, pool in reversed(list(enumerate(size.pools)))}
    setups = [
        MemorySetup(
            memory=memory,
            address=mail.address,
            incarnation=mail.me.incarnation,
            receives=role != "prefill",
            host=ranks.address_of(rank),
            pools=tuple(pool for pool in size.pools if pool.memory == memory),
            device=ranks.devices[rank] if size.on_device else "",
            exchange_blocks=NUM_SLOTS if has_tiers and size.on_device else 0,
        )
        for memory, rank in sorted(firsts.items())
        if memory
    ]
    return start_memories(keep, setups, config.mail)


def _end(remote: Sequence[RemoteHost]) -> None:
    for host in remote:
        host.end()


def _size(
    config: ClusterConfig,
    folder: Path,
    role: Role,
    parallel: ParallelConfig,
    *,
    spawner: Spawner | None,
    found: RankMemory,
    timer: StartTimer,
) -> PoolSize:
    mesh, num_spare = mesh_of(parallel), parallel.ep_redundant_experts
    device = _device_of(config, spawner)
    if device.type == "cpu":
        with timer.within("kernels"):
            native()  # How large a pool is depends on them. Where they were not compiled before they are now.
    memories = spawner.memories if spawner else ()
    return size_pool(
        folder,
        config.model,
        engine_of_role(config.engine, role),
        mesh,
        role=role,
        num_spare=num_spare,
        device=device,
        memories=memories,
        found=found,
        slots=config.adapters,
    )


def _parts(
    config: ClusterConfig,
    folder: Path,
    size: PoolSize,
    parallel: ParallelConfig,
    *,
    access: PoolAccess,
    host: str,
    spawner: Spawner | None,
    remote: tuple[RemoteHost, ...] = (),
    other_memories: Sequence[MemoryPlace] = (),
    timer: StartTimer,
    kept: KeptParts,
) -> InstanceParts:
    exchanges = _exchanges(remote)

    def group(sink: LayerSink | None) -> WorkerGroup:
        if spawner is not None:
            try:
                ranks = start_ranks(
                    folder,
                    config.engine,
                    size,
                    parallel,
                    memories=[MemoryPlace(size.num_bytes, access.path), *other_memories],
                    sink=sink,
                    spawner=spawner,
                    companions=remote,
                    timer=timer,
                    mail=config.mail,
                    loop=kept.loop,
                )
                timer.begin("pool")
                return SavedFirst(ranks, partial(_settled, exchanges)) if exchanges else ranks
            except BaseException:
                _end(remote)
                raise
        memory, own = access.buffer, kept.model
        return build_group(folder, config.model, config.engine, size, memory, sink, timer=timer, kept=own)

    revision = weights_revision(folder)
    tiers = build_tiers(config.engine, access.buffer, size.pools, revision, exchanges, kept=kept.host_tier)
    kept.host_tier = tiers.host if tiers else None
    return InstanceParts(
        shard=size.shard,
        num_blocks=size.num_blocks,
        max_context_tokens=size.max_context_tokens,
        make_receivers=access.make_receivers,
        make_senders=access.make_senders,
        make_group=group,
        host=host,
        source=access.source,
        staging=access.staging,
        tiers=tiers,
        model=revision,
        pools=size.pools,
        steps=first_steps(
            config.engine.profile, size.shard.layout, parallel.num_ranks, size.expert_share, parallel.pp
        ),
        compiles=_device_of(config, spawner).type != "cpu",
        num_groups=parallel.dp,
        encodes=size.encodes,
        remote=remote,
        card=kept.card,
        adapters=size.adapter_keys,
        vocab_size=read_spec(folder, config.model.implementation).vocab_size,
        timer=timer,
        kept=kept,
    )


def _exchanges(remote: Sequence[RemoteHost]) -> dict[int, RemoteBytes]:
    """Return how the pools of other hosts are read and written, by the hosts' numbers."""
    return {
        number: RemoteBytes(host, host.exchange) for number, host in enumerate(remote, 1) if host.exchange
    }


async def _settled(exchanges: Mapping[int, RemoteBytes]) -> None:
    for exchange in exchanges.values():
        await exchange.settled()


def _device_of(config: ClusterConfig, spawner: Spawner | None) -> torch.device:
    """Return what its first rank computes on."""
    return torch.device(spawner.devices[0]) if spawner else choose_device(config.engine.device)

"""Starts the ranks of an instance that has several, from a configuration."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from core.config.cluster_config import EngineConfig, MailConfig
from core.config.parallel_config import ParallelConfig
from core.ports import LayerSink
from core.reports import of_all_ranks
from core.start_timer import StartTimer
from engine.execution.graphs.graph_sizes import GraphSizes
from engine.ranks.expert_balancer import Balancer
from engine.ranks.process_group import ProcessGroup
from engine.ranks.rank import Companion, Spawner
from engine.ranks.rank_messages import MemoryPlace, RankSetup
from engine.ranks.rendezvous import StoreServer
from engine.sizing.model_dims import expert_bytes, mesh_of
from engine.sizing.pool_size import PoolSize
from models.families.table import read_spec
from parallel.balance import first_placement
from parallel.mesh import Mesh


def start_ranks(
    folder: Path,
    engine: EngineConfig,
    size: PoolSize,
    parallel: ParallelConfig,
    *,
    memories: Sequence[MemoryPlace],
    sink: LayerSink | None,
    spawner: Spawner,
    companions: Sequence[Companion] = (),
    timer: StartTimer,
    mail: MailConfig,
    loop: asyncio.AbstractEventLoop | None = None,
) -> ProcessGroup:
    """Start the ranks and block until all are ready. `memories` are those that their pools lie in,
    by number. `companions` are other processes without which the ranks are of no use. `timer` has the phases of the slowest rank
    then; what its process has taken beside them is `ranks`. `mail`, `loop`: as in ProcessGroup.
    Raises ConfigError and ReplicaLost."""
    mesh, num_spare = mesh_of(parallel), parallel.ep_redundant_experts
    balancer, spec = None, read_spec(folder)
    if (moe := spec.moe) is not None and mesh.num_expert_ranks > 1:
        balancer = Balancer(
            first_placement(moe.num_experts, mesh.num_expert_ranks, num_spare),
            mesh.num_expert_ranks,
            parallel.ep_balance_interval_s,
            (loop or asyncio.get_running_loop()).time(),
            max(1, parallel.ep_move_bytes // expert_bytes(spec, size.dtype, mesh.tp)),
        )
    setups = setups_of(
        folder,
        engine,
        size,
        mesh,
        memories=memories,
        devices=spawner.devices,
        num_spare=num_spare,
        addresses=[spawner.address_of(rank) for rank in range(mesh.size)],
    )
    timer.begin("ranks")
    store = StoreServer(spawner.addresses[0], is_encrypted=spawner.encrypts) if spawner.num_far else None
    start = spawner.start
    group = ProcessGroup(
        setups, sink, start, balancer=balancer, companions=companions, store=store, mail=mail, loop=loop
    )
    timer.take_over(of_all_ranks([ready.start for ready in group.ready]))
    return group


def setups_of(
    folder: Path,
    engine: EngineConfig,
    size: PoolSize,
    mesh: Mesh,
    *,
    memories: Sequence[MemoryPlace],
    devices: Sequence[str],
    num_spare: int = 0,
    addresses: Sequence[str] = (),
) -> list[RankSetup]:
    """Return each rank's setup. The group adds where the ranks find each other. `addresses` are those by which the others reach
    each rank; none means that all are on this host."""
    return [
        RankSetup(
            rank=rank,
            mesh=mesh,
            folder=str(folder),
            dtype=size.dtype,
            weights=size.weights,
            load_format=size.load_format,
            packed_cache=size.packed_cache,
            implementation=size.implementation,
            adapters=tuple(size.adapters.items()),
            max_context_tokens=size.max_context_tokens,
            device=devices[rank],
            kernels=engine.kernels,
            deterministic=engine.deterministic,
            num_threads=size.num_threads,
            pools=size.pools,
            memory=memories[pool.memory],
            num_spare=num_spare,
            address=addresses[rank] if addresses else "127.0.0.1",
            max_batch_tokens=engine.max_batch_tokens,
            max_num_seqs=engine.max_num_seqs,
            graphs=GraphSizes.of(engine, hand_over=size.hands_over),
            head=size.draft.setup_of(rank) if size.draft is not None else None,
        )
        for rank, pool in enumerate(size.pools)
    ]

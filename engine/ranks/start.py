"""From a configuration to the running ranks of an instance that has several."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from core.config import EngineConfig, ParallelConfig
from core.ports import LayerSink
from engine.build import PoolSize
from engine.dims import expert_bytes, mesh_of
from engine.ranks.balancing import Balancer
from engine.ranks.group import ProcessGroup
from engine.ranks.rank import Spawner
from engine.ranks.wire import RankSetup
from models.families import read_spec
from parallel.balance import first_placement
from parallel.mesh import Mesh


def start_ranks(
    folder: Path,
    engine: EngineConfig,
    size: PoolSize,
    parallel: ParallelConfig,
    memory: tuple[str, int],
    sink: LayerSink | None,
    spawner: Spawner,
) -> ProcessGroup:
    """`memory`: the path by which ranks can map the memory that their pools lie in, and its bytes.

    Blocks until all ranks are ready. Raises ConfigError and ReplicaLost."""
    mesh, num_spare = mesh_of(parallel), parallel.ep_redundant_experts
    balancer, spec = None, read_spec(folder)
    if (moe := spec.moe) is not None and mesh.num_expert_ranks > 1:
        balancer = Balancer(
            first_placement(moe.num_experts, mesh.num_expert_ranks, num_spare),
            mesh.num_expert_ranks,
            parallel.ep_balance_interval_s,
            asyncio.get_running_loop().time(),
            max(1, parallel.ep_move_bytes // expert_bytes(spec, size.shard.layout.dtype, mesh.tp)),
        )
    setups = setups_of(folder, engine, size, mesh, memory, spawner.devices, num_spare=num_spare)
    return ProcessGroup(setups, sink, spawner.start, balancer=balancer)


def setups_of(
    folder: Path,
    engine: EngineConfig,
    size: PoolSize,
    mesh: Mesh,
    memory: tuple[str, int],
    devices: Sequence[str],
    store_path: str = "",
    num_spare: int = 0,
) -> list[RankSetup]:
    """For each rank. A group says where they find each other."""
    path, num_bytes = memory
    dtype = size.shard.layout.dtype
    return [
        RankSetup(
            rank,
            mesh,
            str(folder),
            dtype,
            devices[rank],
            engine.kernels,
            engine.deterministic,
            engine.num_threads,
            size.pools,
            path,
            num_bytes,
            store_path,
            num_spare,
        )
        for rank in range(mesh.size)
    ]

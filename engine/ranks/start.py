"""From a configuration to the running ranks of an instance that has several."""

from pathlib import Path

import torch

from core.config import EngineConfig
from core.errors import ConfigError
from core.ports import LayerSink
from engine.build import PoolSize
from engine.devices import choose_device
from engine.ranks.group import ProcessGroup
from engine.ranks.wire import RankSetup
from parallel.mesh import Mesh


def start_ranks(
    folder: Path,
    engine: EngineConfig,
    size: PoolSize,
    mesh: Mesh,
    memory: tuple[str, int],
    sink: LayerSink | None,
) -> ProcessGroup:
    """`memory`: the path by which ranks can map the memory that their pools lie in, and its bytes.

    Blocks until all ranks are ready. Raises ConfigError and ReplicaLost."""
    return ProcessGroup(setups_of(folder, engine, size, mesh, memory), sink)


def setups_of(
    folder: Path,
    engine: EngineConfig,
    size: PoolSize,
    mesh: Mesh,
    memory: tuple[str, int],
    store_path: str = "",
) -> list[RankSetup]:
    """For each rank. A group says where they find each other. Raises ConfigError."""
    path, num_bytes = memory
    dtype = size.shard.layout.dtype
    on_gpus = choose_device(engine.device).type == "cuda"
    if on_gpus and torch.cuda.device_count() < mesh.size:
        raise ConfigError(
            f"{mesh} needs {mesh.size} GPUs on this host, which has {torch.cuda.device_count()} for this instance"
        )
    return [
        RankSetup(
            rank,
            mesh,
            str(folder),
            dtype,
            f"cuda:{rank}" if on_gpus else "cpu",
            engine.kernels,
            engine.deterministic,
            engine.num_threads,
            size.pools,
            path,
            num_bytes,
            store_path,
        )
        for rank in range(mesh.size)
    ]

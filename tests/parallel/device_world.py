"""A cluster whose instances of several ranks have their pools on simulated devices: real mail and transports, and a rank and a memory
server for each device, all children of this process."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil

from cluster.instance.instance_parts import InstanceParts, Role
from cluster.instance.real_parts import InstancePlace, remote_parts
from cluster.instance.remote_memory.memory_messages import MemorySetup
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig
from core.cost.memory_model import DeviceMemory
from engine.ranks.rank import Rank, Spawner, rank_name
from engine.ranks.rank_messages import RankSetup
from net.mail import TcpMail
from parallel.mesh import Mesh
from tests.parallel.forked_child import ForkedChild, forked_children
from tests.parallel.simulated_child import simulated_memory, simulated_rank

KEY = b"0123456789abcdef"
MAINS = {"rank": simulated_rank, "memory": simulated_memory}
GPU = DeviceMemory(name="a simulated device", total_bytes=8 << 30, free_bytes=8 << 30, is_host=False)


def running(config: ClusterConfig, notes: Path) -> AbstractAsyncContextManager[LocalCluster]:
    """`notes`: the folder for what devices find unordered."""

    def join(_: str) -> TcpMail:
        return TcpMail(KEY, config=config.mail)

    def place(mesh: Mesh) -> InstancePlace:
        return placed(config, mesh, notes)

    def parts(role: Role, mail: TcpMail) -> InstanceParts:
        return remote_parts(config, Path(config.model.path), role, mail, KEY, place)

    return LocalCluster.assembled(config, join, parts)


def spawner(mesh: Mesh, notes: Path) -> Spawner:
    def start(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
        return [ForkedChild(rank_name(setup), simulated_rank, str(notes)) for setup in setups]

    return Spawner(start, ("cpu",) * mesh.size, (GPU,) * mesh.size)


def placed(config: ClusterConfig, mesh: Mesh, notes: Path) -> InstancePlace:
    def keep(setups: Sequence[MemorySetup], deadline_s: float) -> list[Rank]:
        arguments = simulated_memory, str(notes), config.transfer, KEY
        return [ForkedChild(f"the memory server of rank {rank}", *arguments) for rank, _ in enumerate(setups)]

    return InstancePlace(spawner(mesh, notes), keep_on_devices=keep)


def processes(kind: str) -> list[psutil.Process]:
    """Return the ranks (`rank`) or memory servers (`memory`) in the order in which they were started."""
    return forked_children(MAINS[kind])


def unordered(notes: Path) -> list[str]:
    """Return what devices have found unordered."""
    return [line for path in notes.glob("violations-*") for line in path.read_text().splitlines()]

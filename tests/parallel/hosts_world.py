"""A cluster whose instances' ranks are on hosts of which one process cannot map the other's memory: real mail, transports, ranks and
memory servers, forked."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import psutil

from cluster.instance.instance_parts import InstanceParts, Role
from cluster.instance.real_parts import InstancePlace, remote_parts
from cluster.instance.remote_memory.memory_messages import MemorySetup
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, TransferConfig
from engine.ranks.rank import Rank, Spawner
from engine.sizing.devices import host_memory
from net.mail import TcpMail
from parallel.mesh import Mesh
from tests.parallel.forked_child import ForkedChild, forked_children
from tests.parallel.forked_ranks import start_forked
from tests.parallel.memory_server_child import serve_as

KEY = b"0123456789abcdef"


def placed(config: ClusterConfig, mesh: Mesh) -> InstancePlace:
    """Each stage on a host of its own."""

    def keep(setups: Sequence[MemorySetup], deadline_s: float) -> list[Rank]:
        return [_memory_server(setup, config.transfer) for setup in setups]

    memories = tuple(mesh.place(rank).pp for rank in range(mesh.size))
    spawner = Spawner(
        start_forked,
        ("cpu",) * mesh.size,
        (host_memory(),) * mesh.size,
        memories,
        ("127.0.0.1",) * mesh.pp,
    )
    return InstancePlace(spawner, keep if mesh.pp > 1 else None)


def memory_servers() -> list[psutil.Process]:
    """In the order in which they were started."""
    return forked_children(serve_as)


def _memory_server(setup: MemorySetup, transfer: TransferConfig) -> ForkedChild:
    name = f"the memory server of host {setup.memory}"
    return ForkedChild(name, serve_as, f"host-{setup.memory}", transfer, KEY)


def running(config: ClusterConfig) -> AbstractAsyncContextManager[LocalCluster]:
    def join(_: str) -> TcpMail:
        return TcpMail(KEY, config=config.mail)

    def parts(role: Role, mail: TcpMail) -> InstanceParts:
        return remote_parts(config, Path(config.model.path), role, mail, KEY, partial(placed, config))

    return LocalCluster.assembled(config, join, parts)

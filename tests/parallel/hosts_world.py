"""A cluster whose instances' ranks are on hosts of which one process cannot map the other's memory: real mail, transports, ranks and
keepers, all children of this process."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from cluster.frontend import Frontend
from cluster.instance import Instance, Role
from cluster.keepers.wire import KeeperSetup
from cluster.local import LocalCluster
from cluster.real_parts import Placement, remote_parts
from cluster.recording import make_scheduler
from cluster.scheduler_node import SchedulerNode
from core.clock import WallClock
from core.config import ClusterConfig, TransferConfig
from engine.ranks.rank import Rank, Spawner
from engine.ranks.spawn import start_children
from net.mail import TcpMail
from parallel.mesh import Mesh

ROOT = Path(__file__).parents[2]
KEY = b"0123456789abcdef"
NAME = "tests.parallel.keeper_child"


class ChildKeeper:
    """engine.ranks.rank.Rank."""

    def __init__(self, setup: KeeperSetup, transfer: TransferConfig) -> None:
        self.name = f"the keeper of host {setup.memory}"
        self.sock, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), f"host-{setup.memory}", transfer.model_dump_json(), KEY.decode()]
        self._process = subprocess.Popen(
            [sys.executable, "-m", NAME, *arguments], pass_fds=[theirs.fileno()], cwd=ROOT
        )
        theirs.close()

    def obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3)
        code = self._process.poll()
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"has ended: {code}"
        return f"{self.name} {how}"

    def end(self, patience_s: float = 0.0) -> None:
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.sock.close()


def placed(config: ClusterConfig, mesh: Mesh) -> Placement:
    """Each stage on a host of its own."""

    def keep(setups: Sequence[KeeperSetup], deadline_s: float) -> list[Rank]:
        return [ChildKeeper(setup, config.transfer) for setup in setups]

    memories = tuple(mesh.place(rank).pp for rank in range(mesh.size))
    spawner = Spawner(start_children, ("cpu",) * mesh.size, memories, ("127.0.0.1",) * mesh.pp)
    return Placement(spawner, keep if mesh.pp > 1 else None)


def keepers() -> list[psutil.Process]:
    """In the order in which they were started."""
    return [child for child in psutil.Process().children() if NAME in child.cmdline()]


@contextlib.asynccontextmanager
async def running(config: ClusterConfig) -> AsyncIterator[LocalCluster]:
    clock = WallClock()
    async with contextlib.AsyncExitStack() as stack:
        scheduler_mail = TcpMail(KEY, config=config.mail)
        stack.push_async_callback(scheduler_mail.close)
        node = SchedulerNode(scheduler_mail, clock, make_scheduler(config.schedule))
        stack.push_async_callback(_cancel, asyncio.create_task(node.run()))

        async def resolve() -> list[str]:
            return [scheduler_mail.address]

        instances: list[Instance] = []
        roles: list[Role] = ["decode"] * config.decode_instances
        roles += ["prefill"] * config.prefill_instances
        for role in roles:
            mail = TcpMail(KEY, config=config.mail)
            parts = remote_parts(config, Path(config.model.path), role, mail, KEY, partial(placed, config))
            instance = Instance(config, role, mail, clock, resolve, parts)
            stack.push_async_callback(instance.close)
            instance.run()
            instances.append(instance)
        frontend = Frontend(
            TcpMail(KEY, config=config.mail), clock, config.schedule, config.engine.block_size, resolve, 60.0
        )
        stack.push_async_callback(frontend.close)
        stack.push_async_callback(_cancel, asyncio.create_task(frontend.run()))
        cluster = LocalCluster(frontend, instances)
        await cluster.wait_ready()
        yield cluster


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

"""Starts an MPI program over nodes: MPICH's mpiexec here, and one of its proxies on each node.

mpiexec's launcher `manual` starts nothing. It says with which options a proxy is to be run on each node, and whoever has a
process there runs it: a Ray actor, or `baton doctor` in a pod. The proxy connects to mpiexec and starts the program, without ssh
and without a shell, in its own node's environment.

Programs die with their proxies, proxies with mpiexec or with the process that runs them, and mpiexec with this one."""

import asyncio
import shutil
from collections.abc import Sequence
from typing import Protocol

from cluster.preflight.child_processes import DIE_WITH_PARENT, ProcessEnd, run_here, started, told
from core.errors import ConfigError

MPIEXEC, PROXY = "mpiexec.hydra", "hydra_pmi_proxy"
NEEDED = (MPIEXEC, PROXY, DIE_WITH_PARENT[0])
"""The programs that must be on each node's PATH, beside the one that is to be run."""
_LAUNCH, _LAUNCH_END = "HYDRA_LAUNCH: ", "HYDRA_LAUNCH_END"
_GRACE_S = 2.0
"""How long mpiexec has to say more when a proxy has failed."""


class MpiNode(Protocol):
    """A node on which a proxy can be run."""

    async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
        """Run mpiexec's proxy there until it ends. Raises ConfigError where it fails."""
        ...


async def run_over(
    nodes: Sequence[MpiNode], command: Sequence[str], here: str, deadline_s: float
) -> ProcessEnd:
    """Run `command` as one process on each node, its ranks in the nodes' order. `here` is where the nodes reach this machine.
    Raises ConfigError where it cannot be started, or is not done in time; nothing of it runs on then."""
    # The nodes' names only tell them apart, for several may be on one machine. What MPI says to itself goes over TCP.
    names = [
        f"127.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}" for number in range(1, len(nodes) + 1)
    ]
    options = ["-launcher", "manual", "-localhost", here, "-hosts", ",".join(names), "-ppn", "1"]
    options += ["-n", str(len(nodes)), "-genvnone", "-genv", "UCX_TLS", "tcp,self"]
    try:
        async with (
            asyncio.timeout(deadline_s),
            started([*DIE_WITH_PARENT, MPIEXEC, *options, *DIE_WITH_PARENT, *command]) as mpiexec,
        ):
            return await _run_proxies(mpiexec, nodes, deadline_s)
    except TimeoutError:
        raise ConfigError(f"{command[0]} was not done after {deadline_s:g} s") from None


async def run_proxy_here(options: Sequence[str], deadline_s: float) -> None:
    """Run a proxy on this node, as `MpiNode.run_proxy` does."""
    if shutil.which(PROXY) is None:
        raise ConfigError(f"{PROXY} is not installed")
    ended = await run_here([PROXY, *options], deadline_s + _GRACE_S)
    if ended.status:
        raise ConfigError(f"{PROXY}: {ended.last_words}")


async def _run_proxies(
    mpiexec: asyncio.subprocess.Process, nodes: Sequence[MpiNode], deadline_s: float
) -> ProcessEnd:
    wanted = await _proxy_options(mpiexec, len(nodes))
    done = asyncio.create_task(told(mpiexec))
    proxies = [
        asyncio.create_task(node.run_proxy(options, deadline_s))
        for node, options in zip(nodes, wanted, strict=True)
    ]
    try:
        waiting = {done, *proxies}
        while done in waiting:
            over, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if failed := [error for task in over if task is not done and (error := task.exception())]:
                # A program that fails ends its proxy, too, and mpiexec knows what it has said.
                await asyncio.wait([done], timeout=_GRACE_S)
                if not done.done():
                    raise failed[0]
                break
        return done.result()
    finally:
        for task in (done, *proxies):
            task.cancel()
        await asyncio.gather(done, *proxies, return_exceptions=True)


async def _proxy_options(mpiexec: asyncio.subprocess.Process, num_nodes: int) -> list[list[str]]:
    """Read the options of each node's proxy. Raises ConfigError."""
    assert mpiexec.stdout is not None
    found: list[list[str]] = []
    while (line := (await mpiexec.stdout.readline()).decode()).strip() != _LAUNCH_END:
        if not line:
            raise ConfigError(f"{MPIEXEC}: {(await told(mpiexec)).last_words}")
        if line.startswith(_LAUNCH):
            _, first, rest = line.partition(" --")  # before that is the proxy's path on this machine
            found.append((first + rest).split())
    if len(found) != num_nodes:
        raise ConfigError(f"{MPIEXEC} wants {len(found)} proxies for {num_nodes} nodes")
    return found

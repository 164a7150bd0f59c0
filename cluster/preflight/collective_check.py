"""The collective check over several nodes: one rank process on each, started together, ended together."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.preflight.findings import Finding, Verdict, judge_links
from core.errors import ConfigError

_ROOT = Path(__file__).parents[2]
START_S = 60.0
_MEASURE_S = 60.0
_SLOW_LINK = "find what shares or limits this link: cable, switch port, NIC rate, MTU, container network (ethtool, iperf3)"


class Node(Protocol):
    """One machine, wherever it is."""

    @property
    def name(self) -> str: ...
    async def free_address(self) -> str: ...
    async def run_rank(self, rank: int, world: int, address: str, backend: str, mib: int) -> dict[str, Any]:
        """Run a rank. Raises ConfigError with what the rank said."""
        ...


@dataclass(frozen=True, slots=True)
class LocalNode:
    """This machine."""

    name: str = "this node"
    host: str = "127.0.0.1"

    async def free_address(self) -> str:
        with socket.create_server((self.host, 0)) as probe:
            return f"{self.host}:{probe.getsockname()[1]}"

    async def run_rank(self, rank: int, world: int, address: str, backend: str, mib: int) -> dict[str, Any]:
        return await run_rank_here(rank, world, address, backend, mib)


async def run_rank_here(rank: int, world: int, address: str, backend: str, mib: int) -> dict[str, Any]:
    """Run a rank here. Raises ConfigError when it fails, or is not done in time; its process is gone then."""
    return (await _run(rank, world, address, backend, mib, START_S))[rank]


async def check_as_rank(
    rank: int, world: int, address: str, backend: str, *, mib: int, wait_s: float, expected_bytes_per_s: float
) -> list[Finding]:
    """Check as one rank, for nodes that are not steered from one place, such as the pods of a job. Each runs its own rank, and
    judges all of them.

    Rank 0 listens at `address`. The others may come as late as `wait_s`."""
    names = [f"rank {other}" for other in range(world)]
    try:
        results = await _run(rank, world, address, backend, mib, wait_s)
    except ConfigError as error:
        return [
            Finding(
                where=names[rank],
                check=f"{backend} all-reduce",
                verdict=Verdict.FAIL,
                measured=str(error),
                expected="every rank answers",
                fix=_NO_ANSWER,
            )
        ]
    return _judge(names, results, backend, expected_bytes_per_s)


async def _run(
    rank: int, world: int, address: str, backend: str, mib: int, wait_s: float
) -> list[dict[str, Any]]:
    """Return what all ranks have measured. Raises ConfigError."""
    command = [
        "-m",
        "cluster.preflight.collective_rank",
        str(rank),
        str(world),
        address,
        backend,
        str(mib),
        str(wait_s),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(wait_s + _MEASURE_S):
            out, errors = await process.communicate()
    except TimeoutError:
        raise ConfigError(f"rank {rank} was not done after {wait_s + _MEASURE_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()
        raise ConfigError(f"rank {rank} failed: {last[-1] if last else f'exit {process.returncode}'}")
    return json.loads(out.splitlines()[-1])


async def check_fabric(
    nodes: Sequence[Node], backend: str, mib: int, expected_bytes_per_s: float
) -> list[Finding]:
    """Check an all-reduce and an all-to-all over all nodes, and every directed pair. A single node is paired with itself over
    gloo, since NCCL takes no two ranks on one GPU."""
    backend = backend if len(nodes) > 1 else "gloo"
    ranks = list(nodes) if len(nodes) > 1 else [nodes[0], nodes[0]]
    names = (
        [node.name for node in nodes] if len(nodes) > 1 else [f"{nodes[0].name}, rank {i}" for i in (0, 1)]
    )
    address = await ranks[0].free_address()
    results = await asyncio.gather(
        *(node.run_rank(rank, len(ranks), address, backend, mib) for rank, node in enumerate(ranks)),
        return_exceptions=True,
    )
    failed = [
        Finding(
            where=name,
            check=f"{backend} all-reduce",
            verdict=Verdict.FAIL,
            measured=str(result),
            expected="every rank answers",
            fix=_NO_ANSWER,
        )
        for name, result in zip(names, results, strict=True)
        if isinstance(result, BaseException)
    ]
    if failed:
        return failed
    return _judge(
        names, [r for r in results if not isinstance(r, BaseException)], backend, expected_bytes_per_s
    )


_NO_ANSWER = "can the nodes reach each other on every port (firewall, NetworkPolicy, GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME)?"


def _judge(
    names: Sequence[str], results: Sequence[dict[str, Any]], backend: str, expected_bytes_per_s: float
) -> list[Finding]:
    links = {
        f"{names[r['rank']]} -> {names[int(target)]}": speed
        for r in results
        for target, speed in r["links"].items()
    }
    return [
        *(_judge_all(names, results, backend, operation) for operation in ("all-reduce", "all-to-all")),
        *judge_links(f"{backend} send/recv", links, expected_bytes_per_s, _SLOW_LINK),
    ]


def _judge_all(
    names: Sequence[str], results: Sequence[dict[str, Any]], backend: str, operation: str
) -> Finding:
    wrong = [str(names[int(r["rank"])]) for r in results if not r[operation]["correct"]]
    slowest = min(r[operation]["bus_bytes_per_s"] for r in results)
    return Finding(
        where="all nodes",
        check=f"{backend} {operation}",
        verdict=Verdict.FAIL if wrong else Verdict.OK,
        measured=f"wrong numbers on {', '.join(wrong)}"
        if wrong
        else f"{slowest / 1e9:.2f} GB/s bus bandwidth",
        expected="right numbers",
        fix="numbers change on the way: take these nodes out and test their memory, GPU and NIC"
        if wrong
        else "",
    )

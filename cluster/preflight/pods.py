"""Checks nodes on which nothing of Baton runs yet, such as the pods of a job: the doctor of rank 0 asks, those of the others do.

They speak through a store at rank 0's address. Nothing there says who has written what. So the others do nothing but what the
check consists of, with numbers for options, and their proxies connect to no host but rank 0's."""

import asyncio
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from cluster.preflight.fabric import Ask, check_fabric
from cluster.preflight.findings import Finding, Verdict
from cluster.preflight.local_node import LocalNode
from cluster.preflight.nodes import NO_ANSWER, NodeGpus
from cluster.preflight.rank_job import RankJob, another_connection, store_at
from core.errors import ConfigError

_WORDS = {"--rmk": "user", "--launcher": "manual", "--demux": "poll"}
_NUMBERS = {
    "--pgid",
    "--retries",
    "--usize",
    "--pmi-port",
    "--gpus-per-proc",
    "--gpu-subdevs-per-proc",
    "--proxy-id",
}
_PORT = "--control-port"
"""The options of a proxy that another node may name (`hydra.py`)."""


async def check_as_rank(rank: int, world: int, address: str, ask: Ask, *, wait_s: float) -> list[Finding]:
    """Check as one of several nodes, and return what was found between all of them. Rank 0 listens at `address`, and the others
    may come as late as `wait_s`; so may its name."""
    name = f"rank {rank}"
    try:
        store = await asyncio.to_thread(store_at, address, rank, world, wait_s)
        host = address_towards(address)
        if rank:
            return await _serve(store, rank, LocalNode(name, host), address, ask)
        others = [PodNode(store, other) for other in range(1, world)]
        findings = await check_fabric([LocalNode(name, host), *others], ask, here=host)
        for other in others:
            await other.end(findings)
        return findings
    except (ConfigError, DistError) as error:
        return [
            Finding(
                where=name,
                check="meeting",
                verdict=Verdict.FAIL,
                measured=str(error).splitlines()[0],
                expected="every rank answers",
                fix=NO_ANSWER,
            )
        ]


def address_towards(address: str) -> str:
    """Return where a process at `address` reaches this node: the end of the way to it that is here. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    try:
        family, *_, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # nothing is sent
            return probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{address} is not an address that can be reached: {error}") from error


class PodNode:
    """A cluster.preflight.nodes.Node, as rank 0 sees it. For one caller at a time."""

    def __init__(self, store: TCPStore, rank: int) -> None:
        self.name = f"rank {rank}"
        self._store, self._rank, self._number = another_connection(store), rank, 0
        self._answering: asyncio.Task[bytes] | None = None
        """Waits for the last answer, perhaps for nobody any more."""

    async def free_address(self) -> str:
        return await self._ask("free_address")

    async def gpus(self) -> NodeGpus:
        return NodeGpus(**await self._ask("gpus"))

    async def run_rank(self, job: RankJob) -> dict[str, Any]:
        return await self._ask("run_rank", job.as_json(), within_s=job.deadline_s)

    async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
        await self._ask("run_proxy", [*options], deadline_s, within_s=deadline_s)

    async def end(self, findings: Sequence[Finding]) -> None:
        """Let it have the findings, and go."""
        await self._ask("end", [finding.as_dict() for finding in findings])

    async def _ask(self, what: str, *args: Any, within_s: float = 0.0) -> Any:
        if self._answering is not None:
            # A question that was cancelled leaves its thread waiting for an answer, and that thread holds the store's connection.
            await asyncio.wait([self._answering])
        asked, answered = _keys(self._rank, self._number)
        self._number += 1
        self._store.set(asked, json.dumps([what, *args]))
        self._store.set_timeout(timedelta(seconds=_ANSWER_S + within_s))
        self._answering = asyncio.create_task(asyncio.to_thread(self._store.get, answered))
        self._answering.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            answer, error = json.loads(await asyncio.shield(self._answering))
        except DistError as lost:
            raise ConfigError(f"{self.name} does not answer: {str(lost).splitlines()[0]}") from lost
        if error:
            raise ConfigError(error)
        return answer


_ANSWER_S = 60.0


def _keys(rank: int, number: int) -> tuple[str, str]:
    return f"asked/{rank}/{number}", f"answered/{rank}/{number}"


async def _serve(store: TCPStore, rank: int, node: LocalNode, address: str, ask: Ask) -> list[Finding]:
    """Do what rank 0 asks until it has all findings, and return these. Raises ConfigError, and DistError where it has gone."""
    number = 0
    while True:
        asked, answered = _keys(rank, number)
        number += 1
        what, *args = json.loads(await asyncio.to_thread(store.get, asked))
        if what == "end":
            store.set(answered, json.dumps([None, ""]))
            return [Finding(**finding | {"verdict": Verdict(finding["verdict"])}) for finding in args[0]]
        try:
            answer = await _do(node, address, ask, what, args)
        except ConfigError as error:
            store.set(answered, json.dumps([None, str(error)]))
        else:
            store.set(answered, json.dumps([answer, ""]))


async def _do(node: LocalNode, address: str, ask: Ask, what: str, args: list[Any]) -> Any:
    match what, args:
        case "free_address", []:
            return await node.free_address()
        case "gpus", []:
            return asdict(await node.gpus())
        case "run_rank", [str(job)]:
            own = replace(RankJob.from_json(job), transfer=ask.transfer, security=ask.security)
            return await node.run_rank(own)
        case "run_proxy", [list(options), float(deadline_s)]:
            return await node.run_proxy(checked_options(options, address), deadline_s)
        case _:
            raise ConfigError(f"{node.name} was asked for what no check does: {what}")


def checked_options(options: Sequence[str], address: str) -> list[str]:
    """Return a proxy's options, if they lead to a process at rank 0's `address` alone. Raises ConfigError."""
    found: list[str] = []
    for name, value in zip(options[::2], options[1::2], strict=True):
        port = value.rpartition(":")[2]
        if name == _PORT and port.isdigit():
            value = f"{address.rpartition(':')[0]}:{port}"
        elif _WORDS.get(name) != value and not (name in _NUMBERS and re.fullmatch(r"-?\d+", value)):
            raise ConfigError(f"a proxy is not run with {name} {value}")
        found += [name, value]
    return found

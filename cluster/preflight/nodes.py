"""The nodes that checks run on, and how the ranks of a measurement are run on them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cluster.preflight.findings import Finding, Verdict
from cluster.preflight.rank_job import RankJob

NO_ANSWER = "can the nodes reach each other on every port (firewall, NetworkPolicy, GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME)?"


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """A node's GPUs, and why nccl-tests cannot be run from there to other nodes; empty where they can."""

    count: int
    why_not: str


class Node(Protocol):
    """One machine, wherever it is. Each method raises ConfigError with what failed there."""

    @property
    def name(self) -> str: ...
    async def free_address(self) -> str:
        """Return an address at which other nodes reach a process there."""
        ...

    async def gpus(self) -> NodeGpus: ...
    async def run_rank(self, job: RankJob) -> dict[str, Any]: ...
    async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
        """Run mpiexec's proxy until it ends (`hydra.py`)."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """The nodes on which a measurement's ranks run, and what each rank is called."""

    nodes: Sequence[Node]
    names: Sequence[str]
    is_alone: bool
    """Whether all are on one node. Each takes a GPU of its own there."""

    @classmethod
    def on(cls, nodes: Sequence[Node]) -> "Ranks":
        """Put one on each node. A node alone has two, so that there is a link to measure."""
        if len(nodes) > 1:
            return cls(nodes, [node.name for node in nodes], is_alone=False)
        (node,) = nodes
        return cls([node, node], [f"{node.name}, rank {rank}" for rank in (0, 1)], is_alone=True)

    async def run(self, job: RankJob, check: str) -> tuple[list[dict[str, Any]], list[Finding]]:
        """Run `job` on all of them, each under its own number. Returns what they have measured, in their order, and a finding for
        each that has not; then nothing was measured."""
        met = replace(job, world=len(self.nodes), meeting=await self.nodes[0].free_address())
        jobs = [
            node.run_rank(replace(met, rank=rank, card=rank if self.is_alone else 0))
            for rank, node in enumerate(self.nodes)
        ]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        failed = [
            Finding(
                where=name,
                check=check,
                verdict=Verdict.FAIL,
                measured=str(result) or type(result).__name__,
                expected="every rank answers",
                fix=NO_ANSWER,
            )
            for name, result in zip(self.names, results, strict=True)
            if isinstance(result, BaseException)
        ]
        return ([] if failed else [r for r in results if not isinstance(r, BaseException)]), failed

"""Measures what lies between nodes: what their links carry, and which share of it KV reaches."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.preflight.collective_check import measure_by_torch
from cluster.preflight.findings import Finding, Verdict
from cluster.preflight.kv_check import measure_kv
from cluster.preflight.measured_links import MeasuredLinks
from cluster.preflight.nccl_tests import SENDRECV, measure_over_nodes
from cluster.preflight.nodes import Node, NodeGpus, Ranks
from cluster.preflight.rank_job import RankJob
from core.config.cluster_config import TransferConfig
from core.config.security_config import SecurityConfig

Backend = Literal["nccl", "gloo", "auto"]
"""`auto`: nccl among the nodes that have GPUs, gloo where none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be measured."""

    backend: Backend
    mib: int
    """The size of a message."""
    expected_bytes_per_s: float = 0.0
    """What a link should carry; 0: as much as the others do."""
    transfer: TransferConfig = field(default_factory=TransferConfig)
    """How instances hand over KV."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    """How they encrypt it."""


async def check_fabric(
    nodes: Sequence[Node], ask: Ask, *, here: str = "127.0.0.1", within: Mapping[str, float] | None = None
) -> list[Finding]:
    """Check collectives over all nodes, every link between two of them, and the KV that goes over each.

    `here` is where the nodes reach this machine. `within` has the bytes per second that nccl-tests have measured between the GPUs
    of a node, by its name, where they have."""
    gpus = await asyncio.gather(*(node.gpus() for node in nodes))
    with_gpus = [(node, each) for node, each in zip(nodes, gpus, strict=True) if each.count]
    if ask.backend == "gloo" or not with_gpus:
        return await _check(
            Ranks.on(nodes), ask, "gloo" if ask.backend == "auto" else ask.backend, within or {}, None
        )
    without = [
        Finding(
            where=node.name,
            check="nccl",
            verdict=Verdict.SKIP,
            measured="no GPU: links are measured between nodes with GPUs",
        )
        for node, each in zip(nodes, gpus, strict=True)
        if not each.count
    ]
    ranks = Ranks.on([node for node, _ in with_gpus])
    tests = _Tests(here, [each for _, each in with_gpus])
    return [*without, *await _check(ranks, ask, "nccl", within or {}, tests)]


@dataclass(frozen=True, slots=True)
class _Tests:
    """How nccl-tests could be run over the nodes."""

    here: str
    gpus: Sequence[NodeGpus]

    def why_not(self, names: Sequence[str]) -> str:
        lacking = zip(names, self.gpus, strict=True)
        return "; ".join(f"{name}: {each.why_not}" for name, each in lacking if each.why_not)


async def _check(
    ranks: Ranks,
    ask: Ask,
    backend: Literal["nccl", "gloo"],
    within: Mapping[str, float],
    tests: _Tests | None,
) -> list[Finding]:
    job = RankJob(
        kind="collective_rank",
        rank=0,
        world=0,
        meeting="",
        mib=ask.mib,
        backend=backend,
        key=secrets.token_hex(32),
        transfer=ask.transfer,
        security=ask.security,
    )
    if not ranks.is_alone:
        measured = await _measure_links(ranks, job, ask, tests)
    elif reached := within.get(ranks.nodes[0].name):
        measured = MeasuredLinks([], dict.fromkeys([(0, 1), (1, 0)], reached), SENDRECV)
    else:
        # NCCL takes no two ranks on one GPU.
        measured = await measure_by_torch(ranks, replace(job, backend="gloo"), ask.expected_bytes_per_s)
    return [*measured.findings, *await measure_kv(ranks, replace(job, kind="kv_rank"), measured)]


async def _measure_links(ranks: Ranks, job: RankJob, ask: Ask, tests: _Tests | None) -> MeasuredLinks:
    """Measure by nccl-tests where each node can run them, otherwise by torch.distributed."""
    why = tests.why_not(ranks.names) if tests is not None else ""
    if tests is not None and not why:
        least = min(each.count for each in tests.gpus)
        return await measure_over_nodes(ranks.nodes, least, tests.here, ask.expected_bytes_per_s)
    found = await measure_by_torch(ranks, job, ask.expected_bytes_per_s)
    skipped = Finding(
        where="all nodes",
        check="nccl-tests",
        verdict=Verdict.SKIP,
        measured=f"torch.distributed measures in their place ({why})",
    )
    return replace(found, findings=[skipped, *found.findings]) if why else found

"""What is measured between nodes, by what, and how KV is compared with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.preflight.fabric import Ask, check_fabric
from cluster.preflight.findings import Finding, Verdict
from cluster.preflight.local_node import LocalNode
from cluster.preflight.nodes import NodeGpus
from cluster.preflight.rank_job import RankJob
from core.errors import ConfigError
from tests.cluster.preflight.stand_ins import needs_mpich, put_mpi

OPERATIONS = ("all-reduce", "all-to-all")
ASK = Ask(backend="auto", mib=1)


@dataclass(kw_only=True)
class Scripted:
    """A node whose ranks answer as told."""

    name: str
    speed: float = 1e9
    kv_speed: float = 0.8e9
    wrong: str = ""
    failure: str = ""
    found: NodeGpus = field(default_factory=lambda: NodeGpus(0, "no sendrecv_perf"))
    asked: list[RankJob] = field(default_factory=list[RankJob])

    async def free_address(self) -> str:
        return "127.0.0.1:1"

    async def gpus(self) -> NodeGpus:
        return self.found

    async def run_rank(self, job: RankJob) -> dict[str, Any]:
        self.asked.append(job)
        if self.failure:
            raise ConfigError(self.failure)
        others = [str(rank) for rank in range(job.world) if rank != job.rank]
        if job.kind == "kv_rank":
            ways = {other: {"tcp": self.kv_speed} for other in others}
            return {"rank": job.rank, "ways": ways, "failures": {other: {} for other in others}}
        judged = {
            operation: {"correct": operation != self.wrong, "bus_bytes_per_s": self.speed}
            for operation in OPERATIONS
        }
        return {"rank": job.rank, "links": dict.fromkeys(others, self.speed), **judged}

    async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
        await LocalNode().run_proxy(options, deadline_s)


def with_gpus(*names: str, why_not: str = "") -> list[Scripted]:
    return [Scripted(name=name, found=NodeGpus(8, why_not), kv_speed=12e9) for name in names]


def of(check: str, findings: Sequence[Finding]) -> dict[str, Finding]:
    return {finding.where: finding for finding in findings if finding.check == check}


async def test_a_rank_that_does_not_come_up_is_named_with_what_it_said() -> None:
    nodes = [Scripted(name="a"), Scripted(name="b", failure="rank 1 failed: no route to host")]
    findings = await check_fabric(nodes, ASK)
    assert {(f.where, f.check, f.verdict, f.measured) for f in findings} == {
        ("b", check, Verdict.FAIL, "rank 1 failed: no route to host") for check in ("gloo all-reduce", "KV")
    }


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_wrong_numbers_name_the_node(operation: str) -> None:
    findings = await check_fabric([Scripted(name="a"), Scripted(name="b", wrong=operation)], ASK)
    (failed,) = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    assert (failed.check, failed.measured) == (f"gloo {operation}", "wrong numbers on b")


async def test_on_processors_kv_is_compared_with_messages_of_gloo() -> None:
    findings = await check_fabric([Scripted(name="a"), Scripted(name="b")], ASK)
    assert of("KV", findings)["a -> b"].measured == "0.80 GB/s by tcp, 80% of the 1.00 GB/s of gloo send/recv"


async def test_a_node_alone_is_not_asked_for_two_ranks_on_one_gpu() -> None:
    (node,) = nodes = with_gpus("a")
    findings = await check_fabric(nodes, ASK)
    assert [(job.kind, job.backend, job.rank, job.card) for job in node.asked] == [
        ("collective_rank", "gloo", 0, 0),
        ("collective_rank", "gloo", 1, 1),
        ("kv_rank", "nccl", 0, 0),
        ("kv_rank", "nccl", 1, 1),
    ]
    assert findings[0].check == "gloo all-reduce"


async def test_within_a_node_kv_is_compared_with_what_nccl_tests_have_measured_there() -> None:
    findings = await check_fabric(with_gpus("a"), ASK, within={"a": 300e9})
    assert [f.check for f in findings] == ["KV", "KV"]
    assert "4% of the 300.00 GB/s of sendrecv_perf" in findings[0].measured


async def test_without_nccl_tests_over_nodes_torch_measures_and_that_is_said() -> None:
    nodes = [*with_gpus("a"), *with_gpus("b", why_not="no hydra_pmi_proxy")]
    first, *findings = await check_fabric(nodes, ASK)
    assert (first.check, first.verdict) == ("nccl-tests", Verdict.SKIP)
    assert first.measured == "torch.distributed measures in their place (b: no hydra_pmi_proxy)"
    assert {"nccl all-reduce", "nccl send/recv"} < {finding.check for finding in findings}


@needs_mpich
async def test_nccl_tests_measure_over_nodes_and_kv_is_said_as_a_share_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_mpi(tmp_path, monkeypatch, 48.0)
    nodes = with_gpus("a", "b")
    nodes[1].kv_speed = 36e9
    findings = await check_fabric(nodes, ASK)
    assert {finding.check for finding in findings} == {
        "all_reduce_perf",
        "alltoall_perf",
        "sendrecv_perf",
        "KV",
    }
    assert {job.kind for node in nodes for job in node.asked} == {"kv_rank"}
    kv = of("KV", findings)
    assert (kv["a -> b"].verdict, kv["a -> b"].measured) == (
        Verdict.WARN,
        "12.00 GB/s by tcp, 25% of the 48.00 GB/s of sendrecv_perf",
    )
    assert (kv["b -> a"].verdict, kv["b -> a"].fix) == (Verdict.OK, "")


async def test_nodes_without_gpus_are_left_out_of_what_is_measured_between_gpus() -> None:
    head = Scripted(name="head")
    findings = await check_fabric([head, *with_gpus("a", "b", why_not="no sendrecv_perf")], ASK)
    assert of("nccl", findings)["head"].verdict is Verdict.SKIP
    assert not head.asked
    assert set(of("KV", findings)) == {"a -> b", "b -> a"}

"""The collective check with real processes, and the command as an operator runs it."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.preflight.collective_check import LocalNode, check_as_rank, check_fabric
from cluster.preflight.findings import Verdict
from core.errors import ConfigError
from tests.ports import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
OPERATIONS = ("all-reduce", "all-to-all")


@dataclass(kw_only=True)
class Scripted:
    """A node whose rank answers as told."""

    name: str
    speed: float = 1e9
    wrong: str = ""
    failure: str = ""
    inner: LocalNode = field(default_factory=LocalNode)

    async def free_address(self) -> str:
        return await self.inner.free_address()

    async def run_rank(self, rank: int, world: int, address: str, backend: str, mib: int) -> dict[str, Any]:
        if self.failure:
            raise ConfigError(self.failure)
        links = {str(i): self.speed for i in range(world) if i != rank}
        judged = {
            operation: {"correct": operation != self.wrong, "bus_bytes_per_s": self.speed}
            for operation in OPERATIONS
        }
        return {"rank": rank, "links": links, **judged}


async def test_a_rank_that_does_not_come_up_is_named_with_what_it_said() -> None:
    nodes = [Scripted(name="a"), Scripted(name="b", failure="rank 1 failed: no route to host")]
    (finding,) = await check_fabric(nodes, "gloo", 1, 0)
    assert finding.where == "b"
    assert finding.verdict is Verdict.FAIL
    assert "no route" in finding.measured


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_wrong_numbers_name_the_node(operation: str) -> None:
    findings = await check_fabric([Scripted(name="a"), Scripted(name="b", wrong=operation)], "gloo", 1, 0)
    (failed,) = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    assert (failed.check, failed.measured) == (f"gloo {operation}", "wrong numbers on b")


async def test_a_node_alone_is_not_asked_for_two_ranks_on_one_gpu() -> None:
    asked: list[str] = []

    class Listening(Scripted):
        async def run_rank(
            self, rank: int, world: int, address: str, backend: str, mib: int
        ) -> dict[str, Any]:
            asked.append(backend)
            return await Scripted.run_rank(self, rank, world, address, backend, mib)

    findings = await check_fabric([Listening(name="a")], "nccl", 1, 0)
    assert asked == ["gloo", "gloo"]
    assert findings[0].check == "gloo all-reduce"


def test_the_command_measures_this_node_and_says_that_it_is_fit() -> None:
    command = [sys.executable, "-m", "baton.cli", "doctor", "--json", "--mib", "4", "--backend", "gloo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    findings = {(f["where"], f["check"]): f for f in json.loads(done.stdout)}
    assert {findings[("all nodes", f"gloo {operation}")]["verdict"] for operation in OPERATIONS} == {"ok"}
    assert ("this node, rank 0 -> this node, rank 1", "gloo send/recv") in findings
    assert done.returncode == (1 if any(f["verdict"] == "fail" for f in findings.values()) else 0)


def doctor_as_rank(rank: int, world: int, port: int) -> subprocess.Popen[str]:
    options = [
        "--rank",
        str(rank),
        "--world",
        str(world),
        "--rendezvous",
        f"127.0.0.1:{port}",
        "--wait-s",
        "60",
    ]
    command = [
        sys.executable,
        "-m",
        "baton.cli",
        "doctor",
        "--json",
        "--mib",
        "1",
        "--backend",
        "gloo",
        *options,
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_pods_that_nobody_steers_check_each_other() -> None:
    port = free_port()
    ranks = [doctor_as_rank(rank, 2, port) for rank in (1, 0)]
    for process in ranks:
        out, errors = process.communicate(timeout=110)
        findings = {(f["where"], f["check"]): f for f in json.loads(out)}
        assert findings[("all nodes", "gloo all-reduce")]["verdict"] == "ok", errors
        assert {"rank 0 -> rank 1", "rank 1 -> rank 0"} <= {where for where, _ in findings}


async def test_a_rank_that_stays_alone_says_so() -> None:
    (finding,) = await check_as_rank(
        1, 2, f"127.0.0.1:{free_port()}", "gloo", mib=1, wait_s=2.0, expected_bytes_per_s=0
    )
    assert finding.verdict is Verdict.FAIL
    assert finding.where == "rank 1"

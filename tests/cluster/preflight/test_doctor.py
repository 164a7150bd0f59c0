"""The command as an operator runs it, with real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
OPERATIONS = ("all-reduce", "all-to-all")


@pytest.mark.turns(6, number=3)
def test_the_command_measures_this_node_and_says_that_it_is_fit() -> None:
    command = [sys.executable, "-m", "baton.cli", "doctor", "--json", "--mib", "4", "--backend", "gloo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    findings = {(f["where"], f["check"]): f for f in json.loads(done.stdout)}
    assert {findings[("all nodes", f"gloo {operation}")]["verdict"] for operation in OPERATIONS} == {"ok"}
    link = "this node, rank 0 -> this node, rank 1"
    assert (link, "gloo send/recv") in findings
    assert "of gloo send/recv" in findings[(link, "KV")]["measured"]
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


@pytest.mark.turns(6, number=5)
def test_pods_that_nobody_steers_check_each_other() -> None:
    port = free_port()
    ranks = [doctor_as_rank(rank, 2, port) for rank in (1, 0)]
    for process in ranks:
        out, errors = process.communicate(timeout=110)
        findings = {(f["where"], f["check"]): f for f in json.loads(out)}
        assert findings[("all nodes", "gloo all-reduce")]["verdict"] == "ok", errors
        for check in ("gloo send/recv", "KV"):
            assert {where for where, kind in findings if kind == check} == {
                "rank 0 -> rank 1",
                "rank 1 -> rank 0",
            }

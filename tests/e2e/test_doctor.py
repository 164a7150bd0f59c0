"""`baton doctor` on the nodes of a Ray cluster whose instances are on several of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.preflight.stand_ins import PROGRAMS, needs_mpich, put_mpi
from tests.e2e.cluster_process import ROOT

CONFIG = """
model: {path: /no/such/model}
cpus_per_instance: 1
decode_instances: 1
engine: {kv_bytes: 1073741824}
prefill: {pp: 4, hosts: 3}
decode: {pp: 2, hosts: 2}
"""


def run(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.turns(6, number=2)
@pytest.mark.timeout(240)
def test_each_node_is_asked_for_its_part_of_an_instance_and_what_has_no_room_is_named(tmp_path: Path) -> None:
    """In a process of its own, since a process has one Ray."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    done = run("tests.e2e.doctor_on_nodes", str(tmp_path / "config.yaml"))
    found = json.loads(done.stdout)
    assert [f["verdict"] for f in found if f["check"] == "model"] == ["fail"] * 3
    memory = [f for f in found if f["check"] == "shared memory"]
    assert [f["expected"] for f in memory] == ["0.50 GiB for the KV pools"] * 3
    assert len({f["where"] for f in memory}) == 3
    assert len([f for f in found if f["check"] == "gloo send/recv"]) == 6
    kv = [f for f in found if f["check"] == "KV"]
    assert len(kv) == 6
    assert all("of gloo send/recv" in f["measured"] for f in kv)
    (room,) = [f for f in found if f["check"] == "placement"]
    assert room["verdict"] == "fail"
    assert room["measured"] == (
        "prefill: an instance of 4 ranks must be on 3 hosts, and so many nodes have no 4 CPU"
    )
    assert done.returncode == 1


@needs_mpich
@pytest.mark.slow
@pytest.mark.turns(6, number=4)
@pytest.mark.timeout(240)
def test_nccl_tests_are_run_over_nodes_by_rays_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_mpi(tmp_path, monkeypatch, 48.0)
    done = run("tests.e2e.nccl_tests_on_nodes")
    found = {f["check"]: f for f in json.loads(done.stdout.splitlines()[-1])}
    assert {check: f["verdict"] for check, f in found.items()} == dict.fromkeys(PROGRAMS, "ok"), found
    assert "over 2 nodes of 1 GPUs" in found["all_reduce_perf"]["measured"]

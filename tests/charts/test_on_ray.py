"""What the chart renders for Serve, deployed on a real Ray cluster whose nodes offer what the chart's pods would offer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.deploy.kube.serving_mark import FOLDER
from tests.charts.rendering import ROOT
from tests.ports import free_port


@pytest.mark.slow
@pytest.mark.turns(6, number=1)
@pytest.mark.timeout(600)
def test_every_process_lands_in_its_group_and_the_cluster_answers(tmp_path: Path) -> None:
    """In a process of its own, since a process has one Ray."""
    config = {
        "serve": {"port": free_port()},
        "prefill_instances": 1,
        "decode_instances": 2,
        "decode": {"tp": 2},
    }
    values = {"config": config, "apiKeys": {"enabled": False}, "decode": {"instancesPerPod": 2}}
    (tmp_path / "values.json").write_text(json.dumps(values))
    command = [sys.executable, "-m", "tests.charts.ray_of_chart"]
    command += [str(tmp_path / "values.json"), str(tmp_path / "seen.json")]
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "BATON_CLUSTER_KEY": "from the Secret"}
    env |= {FOLDER: str(tmp_path / "marks")}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-20_000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["placed"] == {
        "Scheduler": ["ingress", "ingress"],
        "Ingress": ["ingress", "ingress"],
        "PrefillPool": ["prefill"],
        "DecodePool": ["decode", "decode"],
    }
    assert seen["ranks"] == [["decode", {"CPU": 0.25}]] * 4
    assert seen["text"]
    assert seen["marks"] == 3, "each instance tells its pod's probe that it computes"

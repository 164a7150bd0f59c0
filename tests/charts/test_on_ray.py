"""What the chart renders for Serve, deployed on a real Ray cluster whose nodes offer what the chart's pods would offer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.kube.serving_mark import FOLDER
from tests.charts.rendering import ROOT
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.turns(6, number=1), pytest.mark.timeout(600)]


def test_every_process_lands_in_its_group_and_the_cluster_answers(tmp_path: Path) -> None:
    config = {"prefill_instances": 1, "decode_instances": 2, "decode": {"tp": 2}}
    seen = seen_on_ray(tmp_path, {"config": config, "decode": {"instancesPerPod": 2}})
    assert seen["placed"] == {
        "Scheduler": ["ingress", "ingress"],
        "Ingress": ["ingress", "ingress"],
        "PrefillPool": ["prefill"],
        "DecodePool": ["decode", "decode"],
    }
    assert seen["ranks"] == [["decode", {"CPU": 0.25}]] * 4
    assert all(seen["texts"].values())
    assert seen["marks"] == 3, "each instance tells its pod's probe that it computes"


def test_each_of_many_models_lands_in_its_own_groups_and_answers_at_one_endpoint(tmp_path: Path) -> None:
    """One model alone, and two that share the memory of one."""
    residency = {"mode": "on_demand", "group": "card", "level": 2, "least_awake_s": 0.2}
    shared = {"path": "embedded", "prefill_instances": 0, "schedule": {"residency": residency}}
    config = {
        "models": {"Me/Code-1.5B": "embedded", "chat": shared, "draft": shared},
        "residency_groups": {"card": {"awake_models": 1}},
        "engine": {"num_blocks": 64},
    }
    seen = seen_on_ray(
        tmp_path, {"config": config, "prefill": {"shmSize": "1Gi"}, "decode": {"shmSize": "1Gi"}}
    )
    assert seen["placed"] == {
        "Ingress": ["ingress", "ingress"],
        "Scheduler-Me-Code-1.5B": ["ingress", "ingress"],
        "Scheduler-chat": ["ingress"],
        "Scheduler-draft": ["ingress"],
        "Group-card": ["ingress"],
        "PrefillPool-Me-Code-1.5B": ["me-code-1-5b-prefill"],
        "DecodePool-Me-Code-1.5B": ["me-code-1-5b-decode"],
        "DecodePool-card": ["card-decode"],
    }
    assert len(seen["texts"]) == 3
    assert len(set(seen["texts"].values())) == 1, "the same weights under three names"
    assert seen["marks"] >= 3


def seen_on_ray(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Deploy in a process of its own, since a process has one Ray."""
    values["config"]["serve"] = {"port": free_port()}
    (folder / "values.json").write_text(json.dumps({**values, "apiKeys": {"enabled": False}}))
    command = [sys.executable, "-m", "tests.charts.ray_of_chart"]
    command += [str(folder / "values.json"), str(folder / "seen.json")]
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "BATON_CLUSTER_KEY": "from the Secret"}
    env |= {FOLDER: str(folder / "marks")}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-20_000:]
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return found

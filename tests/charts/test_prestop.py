"""The end of a pod: what the preStop hook does, on a Ray cluster of a head and two workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.turns(6, number=2)
@pytest.mark.timeout(420)
def test_a_pod_that_is_stopped_finishes_and_gives_its_replicas_away(tmp_path: Path) -> None:
    """In a process of its own, since a process has one Ray."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    script = Path(__file__).parent / "prestop_cluster.py"
    command = [sys.executable, str(script), str(tmp_path / "seen.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-12000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["answered"], seen["answered_where_it_ran"]) == ("whole", True)
    assert 2 < seen["took_s"] < 120, "it waits for the request, and not until its time is over"
    assert (seen["left"], seen["moved"]) == (True, True)
    assert (seen["head_waits_for_others"], seen["head_leaves_when_all_have"]) == (True, True)

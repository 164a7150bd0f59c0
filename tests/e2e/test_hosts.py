"""An instance whose stages Ray has placed on two nodes, each of which has no room for both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.text.tokenizer import load_tokenizer
from parallel.comm import TIMEOUT_S
from tests.e2e.cluster_process import ROOT
from tests.models.served import greedy, make_served, some_prompts


@pytest.mark.slow
@pytest.mark.turns(6, number=5)
@pytest.mark.timeout(420)
def test_stages_on_two_nodes_answer_as_transformers_and_a_lost_memory_server_is_replaced(
    tmp_path: Path,
) -> None:
    """In a process of its own, since a process has one Ray."""
    folder = tmp_path / "model"
    reference, prompts = make_served(folder, "llama", 0), some_prompts(7, 12, 40)
    decode = load_tokenizer(folder).decode
    want = [decode(list(greedy(reference, prompt, 16))) for prompt in prompts]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    command = [sys.executable, "-m", "tests.e2e.ray_of_hosts", str(folder)]
    command += [str(tmp_path / "prompts.json"), str(tmp_path / "seen.json")]
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "BATON_CLUSTER_KEY": "0123456789abcdef"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["nodes"], seen["memory servers"]) == (2, 1)
    assert seen["handed_over"], "no prompt was computed on the two nodes"
    assert seen["first"] == seen["meanwhile"] == seen["after"] == want
    assert seen["lost_after_s"] < TIMEOUT_S / 2, "nobody waits until a collective gives up"
    assert seen["left"] == []

"""Starting and stopping as an operator does."""

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster_process import ROOT, serving
from tests.e2e.reference import corpus_prompts, greedy_texts
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def run_serve(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cli", "serve", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_taken_port_is_one_line_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_serve("--port", str(port))
    assert result.returncode == 2
    assert result.stderr.strip().splitlines() == [
        f"baton: cannot listen on 127.0.0.1:{port}: Address already in use. Try another --port."
    ]


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    result = run_serve("--model", str(tmp_path / "nothing"))
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert str(tmp_path / "nothing") in result.stderr


def test_an_unknown_configuration_key_is_named() -> None:
    result = run_serve("--set", "engine.blocksize=32")
    assert result.returncode == 2
    assert "engine.blocksize" in result.stderr


POOLS = [
    pytest.param(("--prefill", "0"), 1, 0, id="one instance"),
    pytest.param(
        ("--prefill", "1", "--decode", "2", "--set", "schedule.local_threshold_tokens=0"),
        3,
        1,
        id="two pools",
    ),
]


@pytest.mark.turns(2)
@pytest.mark.parametrize(("pools", "num_instances", "notice_s"), POOLS)
def test_one_process_equals_transformers_and_sigterm_lets_running_streams_finish(
    tmp_path: Path, pools: tuple[str, ...], num_instances: int, notice_s: int
) -> None:
    """A request that was answered at all gets the whole answer. Nothing of the server is left then."""
    short, prompts = corpus_prompts(4), corpus_prompts(8, min_tokens=50, max_tokens=200)
    begun = threading.Barrier(len(prompts) + 1)

    def streamed(url: str, prompt: tuple[int, ...]) -> str:
        texts: list[str] = []
        body = asking(prompt, 120) | {"stream": True}
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
            for line in filter(None, answer.iter_lines()):
                if line.startswith("data: {"):
                    texts.append(json.loads(line[6:])["choices"][0]["text"])
                    if len(texts) == 1:
                        begun.wait(PATIENCE_S)
        assert line == "data: [DONE]"
        return "".join(texts)

    options = ("--local", *pools, "--set", f"serve.drain_notice_s={notice_s}")
    with ThreadPoolExecutor(len(prompts)) as threads, serving(*options, log=tmp_path / "log") as server:
        url = f"{server.base_url}/v1/completions"
        answers = [httpx.post(url, json=asking(prompt, 24), timeout=PATIENCE_S) for prompt in short]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == greedy_texts(short, 24)
        server.wait_idle(num_instances)
        running = [threads.submit(streamed, url, prompt) for prompt in prompts]
        begun.wait(PATIENCE_S)
    assert [stream.result() for stream in running] == greedy_texts(prompts, 120)
    assert "stopping: running requests finish first" in (tmp_path / "log").read_text()


def asking(prompt: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
    return {"model": "baton-embedded", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}

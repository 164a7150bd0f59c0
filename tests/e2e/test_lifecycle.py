"""Starting and stopping as an operator does."""

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster_process import ROOT, serving
from tests.e2e.reference import corpus_prompts, greedy_text
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


def test_sigterm_lets_a_running_stream_finish_and_leaves_nothing(tmp_path: Path) -> None:
    prompt = corpus_prompts(1)[0]
    body = {
        "model": "baton-embedded",
        "prompt": list(prompt),
        "max_tokens": 200,
        "temperature": 0,
        "stream": True,
    }
    started, lines = threading.Event(), []
    with serving("--local", log=tmp_path / "log") as server:

        def read() -> None:
            with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(PATIENCE_S)
    reader.join(PATIENCE_S)
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"


def test_sigterm_under_load_loses_no_accepted_request(tmp_path: Path) -> None:
    """A request that was answered at all gets the whole answer."""
    prompts = corpus_prompts(8, min_tokens=50, max_tokens=200)
    expected = [greedy_text(prompt, 120) for prompt in prompts]
    options = ("--local", "--set", "serve.drain_notice_s=1")

    begun = threading.Barrier(len(prompts) + 1)

    def ask(url: str, prompt: tuple[int, ...]) -> str:
        body = {"model": "baton-embedded", "prompt": list(prompt), "max_tokens": 120, "temperature": 0}
        texts: list[str] = []
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line[6:])["choices"][0]["text"])
                    if len(texts) == 1:
                        begun.wait(PATIENCE_S)
        return "".join(texts)

    with ThreadPoolExecutor(8) as pool, serving(*options, log=tmp_path / "log") as server:
        running = [pool.submit(ask, server.base_url, prompt) for prompt in prompts]
        begun.wait(PATIENCE_S)
    assert [answer.result() for answer in running] == expected


@pytest.mark.parametrize(
    "pools",
    [("--prefill", "0"), ("--prefill", "1", "--decode", "2", "--set", "schedule.local_threshold_tokens=0")],
)
def test_one_process_equals_transformers(tmp_path: Path, pools: tuple[str, ...]) -> None:
    with serving("--local", *pools, log=tmp_path / "log") as server:
        for prompt in corpus_prompts(4):
            body = {"model": "baton-embedded", "prompt": list(prompt), "max_tokens": 24, "temperature": 0}
            answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
            assert answer.json()["choices"][0]["text"] == greedy_text(prompt, 24)
        server.wait_idle(1 if pools[1] == "0" else 3)

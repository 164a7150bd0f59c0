"""`baton top` at a real server, and what it shows of trouble."""

import io
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from baton.cli.top import view
from tests.cluster.ingress.observability.conftest import METRICS_KEY, ask
from tests.e2e.cluster_process import ROOT, ServeProcess


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "baton.cli", "top", "--once", *args]
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "160"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_look_at_a_server(server: ServeProcess) -> None:
    for number in range(1, 4):
        ask(server, number)
    shown = run("--base-url", f"{server.base_url}/v1", "--api-key", METRICS_KEY)
    assert shown.returncode == 0, shown.stderr
    assert "baton-embedded   accepting" in shown.stdout
    for word in ("chat", "prefill", "decode", "loopback", "serving"):
        assert word in shown.stdout
    refused = run("--base-url", server.base_url)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "asks for an API key" in refused.stderr


@pytest.mark.slow
def test_nobody_there_is_one_line() -> None:
    failed = run("--base-url", "http://127.0.0.1:9")
    assert failed.returncode == 2
    assert failed.stderr.startswith("baton: no ingress answers at http://127.0.0.1:9")


def test_trouble_shows() -> None:
    work = {"prefix_queried_tokens": 0, "prefix_hit_tokens": 0}
    instance: dict[str, Any] = {
        **{"prefills": False, "decodes": True, "address": "[red]10.0.0.1:5", "defect": "", "leaving": False},
        **{"num_blocks": 100, "free_blocks": 25, "num_running": 3, "num_waiting": 4, "queued_tokens": 5},
        **{"step_s": 0.0213, "work": work},
    }
    broken = {**instance, "defect": "two owners"}
    leaving = {**instance, "leaving": True, "num_blocks": 0}
    slow = {
        **{
            "name": "chat",
            "attainment": 0.5,
            "requests_per_s": 1.0,
            "output_tokens_per_s": 2.0,
            "tpot_target_s": 0.05,
        },
        **{
            "ttft_p50_s": None,
            "ttft_p99_s": 12.0,
            "ttft_target_s": 1.0,
            "tpot_p50_s": 0.001,
            "tpot_p99_s": 0.02,
        },
    }
    asleep = {
        **{"prefills": True, "decodes": True, "address": "h:9", "state": "asleep", "level": 2},
        "wake_s": 1.5,
    }
    status = {
        **{"model": "m", "why_not": "no decode instance is alive", "num_queued": 7, "links": []},
        **{"classes": [slow], "instances": [instance, broken, leaving], "sleepers": [asleep]},
    }
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(view(status))
    text = console.export_text()
    for words in (
        "not accepting: no decode instance is alive",
        "7 waiting",
        "asleep, level 2",
        "[red]10.0.0.1:5",
        "broken accounting",
    ):
        assert words in text
    for words in ("draining", " 75%", " 50%", "12 s", "1.0 ms", "21 ms"):
        assert words in text


def test_several_models_are_listed() -> None:
    counts = {"num_instances": 2, "num_running": 5, "num_queued": 1}
    models = [{"model": "a", "why_not": "", **counts}, {"model": "b", "why_not": "it is [gone]"}]
    status = {"model": "a", "why_not": "", "num_queued": 1, "classes": [], "instances": [], "links": []}
    status["sleepers"] = []
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(view({**status, "models": models}))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["a", "serving", "2", "5", "1"] in lines
    assert ["b", "it", "is", "[gone]", "-", "-", "-"] in lines


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_a_narrow_terminal_has_fewer_columns_and_cuts_nothing(width: int) -> None:
    work = {"prefix_queried_tokens": 100, "prefix_hit_tokens": 75}
    instance = {
        **{
            "address": "10.244.103.117:40617",
            "prefills": False,
            "decodes": True,
            "defect": "",
            "leaving": False,
        },
        **{
            "free_blocks": 50,
            "num_blocks": 100,
            "num_running": 213,
            "num_waiting": 47,
            "queued_tokens": 61_234,
        },
        **{"work": work, "step_s": 0.0213},
    }
    asleep = {
        "address": "10.244.103.118:40617",
        "prefills": True,
        "decodes": False,
        "state": "falling asleep",
    }
    late = {"ttft_p50_s": 0.512, "ttft_p99_s": 12.0, "ttft_target_s": 1.0, "tpot_p50_s": 0.0231}
    late |= {"tpot_p99_s": 0.0462, "tpot_target_s": 0.05, "attainment": 0.87, "requests_per_s": 123.45}
    link = {"source": "10.244.103.117:40617", "target": "10.244.103.118:40617", "transport": "nccl"}
    status = {
        **{"model": "m", "why_not": "", "num_queued": 3, "instances": [instance]},
        "classes": [{"name": "long-context", "output_tokens_per_s": 12_345.6, **late}],
        "sleepers": [{**asleep, "level": 2, "wake_s": 1.5}],
        "links": [{**link, "bytes_per_s": 12.3e9, "transfers_per_s": 12.34, "exposed_p50_s": 0.0123}],
        "models": [
            {"model": "a", "why_not": "", "num_instances": 12, "num_running": 345, "num_queued": 67},
            {
                "model": "b",
                "why_not": "no decode instance is alive, and the last one has failed 8 times in a row",
            },
        ],
    }
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view(status))
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    words = {
        "long-context",
        "87%",
        "12 s",
        "46 ms",
        "decode",
        "50%",
        "213",
        "nccl",
        "12300.00",
        "12 ms",
        "67",
    }
    at_100 = {"12345.6", "47", "21 ms"}
    at_160 = {"TTFT target", "requests/s", "prompt tokens", "61234", "75%", "512 ms", "23 ms", "12.34"}
    wanted = words | (at_100 if width >= 100 else set()) | (at_160 if width >= 160 else set())
    assert {word for word in wanted if word not in text} == set()

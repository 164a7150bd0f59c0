"""When a prefill or decode pod is ready: the chart's own probe, asked of real processes and files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.deploy.kube.serving_mark import FOLDER, ServingMark
from tests.charts.rendering import ROOT, container, pods, render
from tests.patience import PATIENCE_S

INSTANCE = """
import asyncio, os, sys
from cluster.deploy.kube.serving_mark import ServingMark
computes = lambda: not os.path.exists(sys.argv[1])
asyncio.run(ServingMark(os.environ).follow(computes))
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    ray = container(pods(render())["decode"])
    [folder] = [one["value"] for one in ray["env"] if one["name"] == FOLDER]
    return {FOLDER: f"{tmp_path}{folder}", "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


def is_ready(env: dict[str, str]) -> bool:
    """Ask as the kubelet does."""
    made = pods(render())
    command = container(made["decode"])["readinessProbe"]["exec"]["command"]
    assert command == container(made["prefill"])["readinessProbe"]["exec"]["command"]
    return subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0


def eventually(holds: Callable[[], bool]) -> None:
    deadline_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_at
        time.sleep(0.05)


def let_time_pass(env: dict[str, str], seconds: float) -> None:
    """Make all that was said as much older."""
    for mark in Path(env[FOLDER]).iterdir():
        then = mark.stat().st_mtime - seconds
        os.utime(mark, (then, then))


@contextmanager
def instance(env: dict[str, str], stops: Path) -> Generator[subprocess.Popen[bytes]]:
    """A process that computes until the file `stops` exists."""
    with subprocess.Popen([sys.executable, "-c", INSTANCE, str(stops)], env=env) as made:
        try:
            yield made
        finally:
            made.kill()


def test_a_pod_is_ready_while_an_instance_in_it_computes(env: dict[str, str], tmp_path: Path) -> None:
    assert not is_ready(env), "its model is being loaded"
    with instance(env, tmp_path / "drains") as first:
        eventually(lambda: is_ready(env))
        (tmp_path / "drains").touch()
        eventually(lambda: not is_ready(env))
        assert first.poll() is None, "it lives, and computes for nobody new"
        with instance(env, tmp_path / "never"):
            eventually(lambda: is_ready(env))
        let_time_pass(env, 11)
        assert not is_ready(env), "it was killed, and has left its mark"


def test_a_pod_is_not_ready_when_its_instance_lives_and_stands_still(
    env: dict[str, str], tmp_path: Path
) -> None:
    with instance(env, tmp_path / "never") as process:
        eventually(lambda: is_ready(env))
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        let_time_pass(env, 11)
        assert process.poll() is None
        assert not is_ready(env)
        process.send_signal(signal.SIGCONT)
        eventually(lambda: is_ready(env))


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    mark = ServingMark({FOLDER: str(tmp_path / "file" / "folder")})
    for _ in range(3):
        mark.renew()
    mark.withdraw()
    assert caplog.text.count("Kubernetes cannot be told") == 1


def test_outside_of_kubernetes_nothing_is_written() -> None:
    mark = ServingMark({})
    mark.renew()
    mark.withdraw()

"""MPI programs over nodes: started without ssh, with each node's environment, and ended with whoever has started them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from cluster.preflight.child_processes import run_here
from cluster.preflight.hydra import PROXY, run_over
from cluster.preflight.local_node import LocalNode
from core.errors import ConfigError
from tests.cluster.preflight.stand_ins import mpi_program, needs_mpich, put
from tests.patience import PATIENCE_S

pytestmark = needs_mpich
HERE = "127.0.0.1"
ROOT = Path(__file__).parents[3]
WAITS = "#!/bin/sh\necho $$ > {fifo}\nexec sleep 600\n"
RUNNER = """
import asyncio
from cluster.preflight.hydra import run_over, run_proxy_here

class Node:
    async def run_proxy(self, options, deadline_s):
        await run_proxy_here(options, deadline_s)

asyncio.run(run_over([Node()] * 2, ["stand_in"], "127.0.0.1", 600))
"""


class Elsewhere(LocalNode):
    """A node whose processes have an environment of their own."""

    async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
        await run_here(["env", f"WHERE={self.name}", PROXY, *options], deadline_s)


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each process of the program `stand_in` says its number. It then waits."""
    os.mkfifo(tmp_path / "fifo")
    put(tmp_path, monkeypatch, "stand_in", WAITS.format(fifo=tmp_path / "fifo"))
    return tmp_path / "fifo"


def said(fifo: Path, count: int) -> list[psutil.Process]:
    """Wait for so many processes."""
    found: list[psutil.Process] = []
    with opened(fifo) as lines:
        while len(found) < count:
            found.append(psutil.Process(int(lines.readline())))
    return found


def opened(fifo: Path) -> TextIO:
    """Open it for reading, and for writing, too, so that it does not end between two processes."""
    return os.fdopen(os.open(fifo, os.O_RDWR))


def all_end(processes: Sequence[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, PATIENCE_S)[1]


async def test_ranks_on_all_nodes_speak_with_each_other_in_their_own_nodes_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "here")
    put(tmp_path, monkeypatch, "stand_in", mpi_program(tmp_path, "and its output"))
    ended = await run_over([Elsewhere("a"), Elsewhere("b"), LocalNode()], ["stand_in"], HERE, PATIENCE_S)
    assert (ended.status, ended.errors) == (0, "")
    assert "ranks: 3 where: a" in ended.out
    assert "and its output" in ended.out


async def test_what_a_program_says_as_it_fails_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, "stand_in", "#!/bin/sh\necho unhandled cuda error >&2\nexit 3\n")
    ended = await run_over([LocalNode()] * 2, ["stand_in"], HERE, PATIENCE_S)
    assert ended.status
    assert "unhandled cuda error" in ended.errors


async def test_a_program_that_is_not_done_in_time_is_refused(fifo: Path) -> None:
    with opened(fifo), pytest.raises(ConfigError, match="stand_in was not done after 0.2 s"):
        await run_over([LocalNode()] * 2, ["stand_in"], HERE, 0.2)


async def test_nothing_runs_on_when_nobody_waits_for_it_any_more(fifo: Path) -> None:
    waiting = asyncio.create_task(run_over([LocalNode()] * 2, ["stand_in"], HERE, 600))
    processes = await asyncio.to_thread(said, fifo, 2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert all_end(processes)


def test_nothing_runs_on_when_what_has_started_it_is_killed(fifo: Path) -> None:
    runner = subprocess.Popen([sys.executable, "-c", RUNNER], cwd=ROOT)
    processes = said(fifo, 2)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert all_end(processes)


async def test_a_node_that_cannot_run_a_proxy_is_known_by_what_it_says(fifo: Path) -> None:
    class Cut(LocalNode):
        async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
            raise ConfigError("hydra_pmi_proxy is not installed")

    with opened(fifo), pytest.raises(ConfigError, match="hydra_pmi_proxy is not installed"):
        await run_over([LocalNode(), Cut()], ["stand_in"], HERE, 600)

"""An instance's ranks as child processes of its own.

A rank's socket has no name and its descriptor goes to that process alone, so nobody else can speak for the instance or a rank.
The kernel's parent-death signal follows the thread that starts a process, so that thread must live as long as the instance."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from core.config.cluster_config import EngineConfig
from core.errors import ConfigError
from core.parent_death import child_environment
from engine.ranks.rank import Rank, Spawner, rank_name
from engine.ranks.rank_logs import log_line_of
from engine.ranks.rank_messages import RankSetup
from engine.sizing.devices import choose_device, host_memory, unused_gpu
from parallel.mesh import Mesh

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_LAST_LINES = 8
END_S = 3.0


class Child:
    """An engine.ranks.rank.Rank that runs `python -P -m MODULE FD ARGUMENTS`, started by its construction."""

    def __init__(self, name: str, module: str, *arguments: str, num_threads: int = 1) -> None:
        self.name = name
        self.sock, theirs = socket.socketpair()
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=child_environment(own),
        )
        theirs.close()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._stderr = threading.Thread(target=self._copy_stderr, name="baton-rank-stderr", daemon=True)
        self._stderr.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def obituary(self) -> str:
        """Return how it ended, or that it had to be ended, and its last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        code = self._process.poll()
        if code is None:
            how = "has closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        self._stderr.join(END_S)
        words = " | ".join(self._last_lines)
        return f"{self.name} {how}" + (f"; its last lines: {words}" if words else "")

    def end(self, patience_s: float = 0.0) -> None:
        """Wait until it has ended by itself, and kill it after `patience_s`."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._wait_for_the_kernel()
        self.sock.close()
        self._stderr.join(END_S)

    def _wait_for_the_kernel(self) -> None:
        """Wait until it is gone. One that is stuck within a driver runs no code of its own any more, so nobody waits for it."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            log.error("%s was killed, and a driver keeps its process: %d", self.name, self._process.pid)

    def _copy_stderr(self) -> None:
        """Copy what it says until it has ended, however long after `end` that is."""
        assert self._process.stderr is not None
        with self._process.stderr as said, contextlib.suppress(OSError):
            for line in said:
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                log_line_of(self.name, text)


def start_children(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
    """Start all ranks of `setups` as engine.ranks.rank.Start does."""
    ranks: list[Rank] = []
    try:
        for setup in setups:  # one by one: those that run must be ended when the next one cannot be started
            rank = Child(rank_name(setup), "engine.ranks.rank_process", num_threads=setup.num_threads)
            ranks.append(rank)
    except BaseException:
        for rank in ranks:
            rank.end()
        raise
    return ranks


def children(engine: EngineConfig, mesh: Mesh) -> Spawner:
    """Return a Spawner of child processes. Raises ConfigError."""
    if choose_device(engine.device).type == "cpu":
        return Spawner(start_children, ("cpu",) * mesh.size, (host_memory(),) * mesh.size)
    num_gpus = torch.cuda.device_count()
    if num_gpus < mesh.size:
        raise ConfigError(
            f"{mesh} needs {mesh.size} GPUs on this host, which has {num_gpus} for this instance"
        )
    memory = tuple(unused_gpu(rank) for rank in range(mesh.size))
    return Spawner(start_children, tuple(f"cuda:{rank}" for rank in range(mesh.size)), memory)

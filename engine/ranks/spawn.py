"""Starts and ends the processes of an instance's ranks.

A rank's socket has no name and its descriptor goes to that process alone: nobody else can speak for the instance or a rank.
The kernel's parent-death signal follows the thread that starts a process: that must be one that lives as long as the instance."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from core.errors import ConfigError, ReplicaLost
from engine.ranks.wire import FROM_RANK, RankFailed, RankSetup, Ready, frame, read_frame

_ROOT = Path(__file__).parents[2]
_LAST_LINES = 8
_END_S = 3.0


class RankProcess:
    """One rank, starting from the moment of its construction."""

    def __init__(self, setup: RankSetup) -> None:
        self.setup = setup
        self.name = f"rank {setup.rank} of {setup.mesh.size} ({setup.mesh.place(setup.rank)})"
        self.sock, theirs = socket.socketpair()
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = str(setup.num_threads)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.ranks.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads},
        )
        theirs.close()
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._stderr = threading.Thread(target=self._copy_stderr, name="baton-rank-stderr", daemon=True)
        self._stderr.start()
        self.sock.sendall(frame(setup))

    @property
    def pid(self) -> int:
        return self._process.pid

    def read_ready(self) -> Ready:
        """Its first word, which has begun to arrive. Raises ConfigError for what it cannot do, ReplicaLost if it ended."""
        try:
            answer = read_frame(self.sock, FROM_RANK)
        except OSError:
            answer = None
        match answer:
            case Ready():
                return answer
            case RankFailed(reason):
                raise ConfigError(f"{self.name} did not start: {reason}")
            case _:
                raise ReplicaLost(self.obituary())

    def exit_code(self) -> int | None:
        return self._process.poll()

    def obituary(self) -> str:
        """How it ended, or that it had to be ended, and its last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.poll()
        if code is None:
            how = "has closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        self._stderr.join(_END_S)
        words = " | ".join(self._last_lines)
        return f"{self.name} {how}" + (f"; its last lines: {words}" if words else "")

    def end(self, patience_s: float = 0.0) -> None:
        """Returns when it has ended: by itself, within `patience_s`, or killed."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.sock.close()
        self._stderr.join(_END_S)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _copy_stderr(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError, OSError):  # closed under us at the end
            for line in self._process.stderr:
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                sys.stderr.write(f"{self.name}: {text}\n")


def start_all(setups: Sequence[RankSetup], deadline_s: float) -> tuple[list[RankProcess], list[Ready]]:
    """All of them, or none. Blocks until they are ready. Raises ConfigError and ReplicaLost."""
    ranks: list[RankProcess] = []
    try:
        for (
            setup
        ) in setups:  # one by one: those that have been started must be ended when the next one cannot be
            ranks.append(RankProcess(setup))  # noqa: PERF401
        return ranks, _all_ready(ranks, time.monotonic() + deadline_s, deadline_s)
    except BaseException:
        for rank in ranks:
            rank.end()
        raise


def _all_ready(ranks: Sequence[RankProcess], deadline: float, deadline_s: float) -> list[Ready]:
    """The first failure of any ends the waiting for all."""
    ready: dict[int, Ready] = {}
    with selectors.DefaultSelector() as selector:
        for number, rank in enumerate(ranks):
            selector.register(rank.sock, selectors.EVENT_READ, number)
        while len(ready) < len(ranks):
            found = selector.select(max(0.0, deadline - time.monotonic()))
            if not found:
                late = ", ".join(rank.name for number, rank in enumerate(ranks) if number not in ready)
                raise ReplicaLost(f"{late}: not ready after {deadline_s:.0f} s")
            for key, _ in found:
                ready[key.data] = ranks[key.data].read_ready()
                selector.unregister(key.fileobj)
    return [ready[number] for number in range(len(ranks))]

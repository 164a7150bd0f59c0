"""Children of an instance that are forked (tests/forked.py): starting one from nothing takes it several seconds of a processor."""

import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil

from engine.ranks.child_ranks import Child
from tests.forked import FORKED

Main = Callable[..., int]
"""It is called with its socket and arguments, and returns what the process ends with."""


class ForkedChild(Child):
    """A Child that calls a function, and not a module."""

    def __init__(self, name: str, main: Main, *arguments: Any) -> None:
        self.name = name
        self.sock, theirs = socket.socketpair()
        self._process: Any = _Forked(main, theirs, *arguments)
        theirs.close()
        self._last_lines = deque(maxlen=8)
        self._stderr = threading.Thread(target=self._copy_stderr, daemon=True)
        self._stderr.start()
        _started.append((main, self))

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


_started: list[tuple[Main, ForkedChild]] = []


def forked_children(main: Main) -> list[psutil.Process]:
    """Return the living ones that were started with this function, in the order in which they were started."""
    _started[:] = [(each, child) for each, child in _started if not child.has_ended]
    return [psutil.Process(child.pid) for each, child in _started if each is main]


class _Forked:
    """What Child asks of a subprocess.Popen."""

    def __init__(self, main: Main, sock: socket.socket, *arguments: Any) -> None:
        said, errors = socket.socketpair()
        self.stderr = said.makefile("rb")
        said.close()
        self._process = FORKED.Process(
            target=_begin, args=(main, errors, dict(os.environ), sock, arguments), daemon=True
        )
        self._process.start()
        errors.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()


def _begin(
    main: Main,
    errors: socket.socket,
    environment: dict[str, str],
    sock: socket.socket,
    arguments: tuple[Any, ...],
) -> None:
    os.dup2(errors.fileno(), 2)
    errors.close()
    os.environ.clear()  # it is what the server that forks was started with
    os.environ |= environment
    os._exit(main(sock, *arguments))

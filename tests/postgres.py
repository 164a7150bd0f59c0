"""A PostgreSQL of the tests' own: an ordinary user's, on a socket in a temporary folder. Debian's package brings the programs."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

_PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))


class Postgres:
    def __init__(self, folder: Path, programs: Path) -> None:
        self._data, self._socket, self._programs = folder / "data", folder, programs
        self._user = _ordinary_user()
        if self._user:
            os.chown(folder, pwd.getpwnam(self._user).pw_uid, -1)
        made = ("--no-sync", "--auth=trust", "--username=baton", "--encoding=UTF8", "--locale=C.UTF-8")
        self._run("initdb", "--pgdata", str(self._data), *made)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_made = 0

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://baton@/{database}?host={self._socket}"

    def start(self) -> None:
        """Start it. Returns when it answers."""
        options = {"listen_addresses": "", "unix_socket_directories": str(self._socket), "fsync": "off"}
        settings = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        self._process = subprocess.Popen(
            [self._programs / "postgres", "-D", self._data, *settings],
            user=self._user, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._socket,
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run(
            [self._programs / "pg_isready", "-q", "-h", self._socket], check=False
        ).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(self, how: int = signal.SIGINT) -> None:
        """Stop it. SIGINT: as an operator does; SIGQUIT: as if it had crashed."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE_S)
            self._process = None

    def hang(self) -> None:
        """Stop the server and all connections' processes, as a host does that nobody reaches any more."""
        for pid in self._processes():
            os.kill(pid, signal.SIGSTOP)

    def wake(self) -> None:
        for pid in self._processes():
            os.kill(pid, signal.SIGCONT)

    def new_database(self) -> str:
        """Return the URL of an empty database."""
        self._num_made += 1
        self._run("createdb", "-h", str(self._socket), "-U", "baton", f"test{self._num_made}")
        return self.url(f"test{self._num_made}")

    def _processes(self) -> list[int]:
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments], user=self._user, check=True, capture_output=True, cwd=self._socket
        )  # fmt: skip


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Skips the test where PostgreSQL is not installed."""
    if not _PROGRAMS:
        pytest.skip("PostgreSQL is not installed (.ci/install-programs)")
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # a socket's path has 107 bytes at the most
    server = Postgres(folder, _PROGRAMS[-1])
    try:
        server.start()
        yield server
    finally:
        with suppress(ProcessLookupError, AssertionError):
            server.wake()
        server.stop(signal.SIGQUIT)
        shutil.rmtree(folder)


def _ordinary_user() -> str | None:
    """Return whose the server is: PostgreSQL refuses root."""
    return "nobody" if os.getuid() == 0 else None

"""A real `baton serve` in a process of its own, for the end-to-end tests."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.processes import command

ROOT = Path(__file__).resolve().parents[2]
SILENCE_S = 180.0
"""How long a server that starts may say nothing new, and a status may take to come, however busy the machine is: a replica that is
started again imports for seconds of a processor."""
_LOOK_S = 10.0
"""What one look takes at most. A machine may stand still for longer, which is nobody's silence."""


class ServeProcess:
    """`baton serve` with the given arguments, up to `stop`. `base_url` answers once the constructor returns."""

    def __init__(self, *args: str, log: Path) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [
            sys.executable,
            "-m",
            "baton.cli",
            "serve",
            "--port",
            str(self.port),
            "--log-level",
            "info",
            "--set",
            "serve.drain_notice_s=0",
            *args,
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until a request would be answered."""
        said, silent_s, looked_at = -1, 0.0, time.monotonic()
        while (size := self.log.stat().st_size) != said or silent_s < SILENCE_S:
            now = time.monotonic()
            silent_s = silent_s + min(now - looked_at, _LOOK_S) if size == said else 0.0
            said, looked_at = size, now
            assert self.process.poll() is None, f"baton serve ended:\n{self.log.read_text()[-4000:]}"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.base_url}/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        self.process.send_signal(signal.SIGABRT)  # it writes what each of its threads does
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_S)
        self.kill()
        raise AssertionError(
            f"baton serve is not ready, and has said nothing for {SILENCE_S:g} s:\n{self.log.read_text()[-8000:]}"
        )

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """The processes of one Serve deployment, oldest first."""
        found: list[tuple[float, psutil.Process]] = []
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(f"ServeReplica:baton:{deployment}" in part for part in command(process)):
                    found.append((process.create_time(), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]

    def listening(self) -> list[tuple[str, str]]:
        """(process, address) of everything that a process of this server listens at."""
        found: list[tuple[str, str]] = []
        for process in [psutil.Process(self.process.pid), *self.descendants()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                sockets = [one for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
                # An IPv6 socket calls an IPv4 address by its mapped name.
                found += [(_describe(process), one.laddr.ip.removeprefix("::ffff:")) for one in sockets]
        return found

    def memory_bytes(self) -> int:
        """The memory of all processes together; what several share counts once."""
        total = 0
        for process in [psutil.Process(self.process.pid), *self.descendants()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def status(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.base_url}/cluster", timeout=PATIENCE_S)
        answer.raise_for_status()
        return answer.json()

    def wait_status(self, what: str, done: Any) -> dict[str, Any]:
        deadline = time.monotonic() + SILENCE_S
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                status = self.status()
                if done(status):
                    return status
            time.sleep(0.1)
        raise AssertionError(f"not within {SILENCE_S:g} s: {what}; last status {status}")

    def wait_idle(self, num_instances: int) -> dict[str, Any]:
        """Every instance is there, holds no used block and found its accounting in order."""

        def idle(status: dict[str, Any]) -> bool:
            instances = status["instances"]
            return len(instances) == num_instances and all(
                i["free_blocks"] == i["num_blocks"] and not i["num_running"] and not i["num_waiting"]
                for i in instances
            )

        status = self.wait_status("all pools back to zero used blocks", idle)
        assert [i["defect"] for i in status["instances"]] == [""] * num_instances
        return status

    def stop(self) -> int:
        """SIGTERM, and wait until everything is gone. Returns the exit status."""
        descendants = self.descendants()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(PATIENCE_S)
        finally:
            self.kill()
        deadline = time.monotonic() + PATIENCE_S
        while (alive := [p for p in descendants if _is_alive(p)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [_describe(process) for process in alive]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert not left, f"processes are left behind: {left}"
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)


def _is_alive(process: psutil.Process) -> bool:
    """A zombie holds nothing; whether it is reaped is up to whoever adopted it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:80]}"
    return str(process.pid)


@contextlib.contextmanager
def serving(*args: str, log: Path) -> Iterator[ServeProcess]:
    server = ServeProcess(*args, log=log)
    try:
        yield server
        assert server.stop() == 0, log.read_text()[-4000:]
    finally:
        server.kill()

"""The process of an instance that can do nothing more ends by itself, and no other one does."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cluster.instance.process_guard import EXIT_CODE
from tests.patience import PATIENCE_S
from tests.processes import is_running

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 0.2
"""Six times as long a guard waits."""
SCRIPT = """
    import asyncio, ctypes, sys, threading
    from types import SimpleNamespace
    from cluster.instance.process_guard import ProcessGuard
    from core.config.cluster_config import MailConfig

    async def main():
        instance = SimpleNamespace(stuck=asyncio.Event(), failure="step 7 has not ended")
        guard = ProcessGuard(instance, MailConfig(heartbeat_s=0.05, peer_timeout_s=0.2))
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print("ready", flush=True)
        while line := (await reader.readline()).decode().strip():
            if line == "seize":
                threading.Thread(target=ctypes.PyDLL(None).sleep, args=(1000,), daemon=True).start()
            elif line == "stuck":
                instance.stuck.set()
            elif line == "echo":
                print("echo", flush=True)
        await guard.close()
        print("closed", flush=True)

    asyncio.run(main())
"""


class Guarded:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.hear("ready")
        (self.guard,) = psutil.Process(process.pid).children()

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def ended(self) -> tuple[int, str]:
        """Return how it has ended, and what was written to its standard error."""
        assert self.process.stderr is not None
        code = self.process.wait(PATIENCE_S)
        psutil.wait_procs([self.guard], PATIENCE_S)
        assert not is_running(self.guard.pid), "a guard has outlived its process"
        return code, self.process.stderr.read()


@contextmanager
def guarded() -> Generator[Guarded]:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
    ) as process:
        try:
            yield Guarded(process)
        finally:
            process.kill()


def test_a_process_whose_thread_keeps_the_interpreter_is_killed() -> None:
    with guarded() as one:
        one.say("seize")
        code, words = one.ended()
        assert code == -signal.SIGKILL
        assert f"its event loop has stood still for {6 * TIMEOUT_S:g} s" in words


def test_a_process_whose_thread_computes_for_ever_ends_and_says_why() -> None:
    with guarded() as one:
        one.say("stuck")
        code, words = one.ended()
        assert code == EXIT_CODE
        assert "a thread of it computes for ever: step 7 has not ended" in words


def test_a_process_that_is_stopped_and_goes_on_is_left_alone() -> None:
    with guarded() as one:
        one.process.send_signal(signal.SIGSTOP)
        time.sleep(10 * TIMEOUT_S)
        one.process.send_signal(signal.SIGCONT)
        one.say("echo")
        one.hear("echo")


def test_a_process_that_ends_is_not_ended_before() -> None:
    with guarded() as one:
        assert one.process.stdin is not None
        one.process.stdin.close()
        one.hear("closed")
        assert one.ended() == (0, "")

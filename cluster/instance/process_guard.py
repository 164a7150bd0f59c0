"""Ends the process of an instance that can do nothing more. Whoever started it starts another.

Two things cannot be ended otherwise. A thread that computes for ever keeps the instance's GPU and might go on some day. A thread
that keeps the interpreter to itself stops the event loop as well, and then nothing in the process can notice. So a child process
does (`guard_process.py`): the event loop writes to its pipe, and it kills a process that does not."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from core.config.mail_config import MailConfig

if TYPE_CHECKING:
    from cluster.instance.colocated_instances import ColocatedInstances
    from cluster.instance.instance import Instance
    from cluster.instance.resident_instance import ResidentInstance

    Guarded = Instance | ResidentInstance | ColocatedInstances

log = logging.getLogger(__name__)

EXIT_CODE = 70
_SILENT_BEATS = 6.0
"""How many times as long as its peers the guard waits for a silent process. By then they have given it up."""
_GUARD = Path(__file__).with_name("guard_process.py")


class ProcessGuard:
    """For an instance that has its process for itself. Make it on the event loop that is to be guarded."""

    def __init__(self, instance: "Guarded", mail: MailConfig) -> None:
        self._beat_s = mail.heartbeat_s
        num_silent = max(2, round(_SILENT_BEATS * mail.peer_timeout_s / mail.heartbeat_s))
        self._child = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                str(_GUARD),
                str(os.getpid()),
                str(mail.heartbeat_s),
                str(num_silent),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the instance
        )
        assert self._child.stdin is not None
        self._pipe = self._child.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._end_when_stuck(instance))]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._child.stdin is not None
        self._child.stdin.close()
        await asyncio.to_thread(self._child.wait)

    async def _beat(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody has ended the guard
            while True:
                with contextlib.suppress(BlockingIOError):  # the guard is stopped, and has enough to read
                    os.write(self._pipe, b".")
                await asyncio.sleep(self._beat_s)

    async def _end_when_stuck(self, instance: "Guarded") -> None:
        await instance.stuck.wait()
        await asyncio.sleep(2 * self._beat_s)  # what was said of the failure leaves
        log.critical("this process ends, since a thread of it computes for ever: %s", instance.failure)
        for handler in logging.getLogger().handlers:
            handler.flush()
        # Without any clean-up: that would wait for the thread.
        os._exit(EXIT_CODE)

"""Processes that a check starts on this machine: each ends with the block that has started it, or with this process."""

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from core.errors import ConfigError

DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before a command: the kernel kills it when its parent dies, however that was. setpriv is of util-linux."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process has ended, and what it has said."""

    status: int
    out: str
    errors: str

    @property
    def last_words(self) -> str:
        lines = (self.errors or self.out).strip().splitlines()
        return lines[-1] if lines else f"exit {self.status}, and it said nothing"


@asynccontextmanager
async def started(command: Sequence[str], stdin: int = DEVNULL, **where: Any) -> AsyncGenerator[Process]:
    """Run a command, without a shell. It is killed where the block ends before it does. `where`: its `cwd` and `env`."""
    process = await asyncio.create_subprocess_exec(*command, stdin=stdin, stdout=PIPE, stderr=PIPE, **where)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def told(process: Process, question: bytes | None = None) -> ProcessEnd:
    """Write `question` to a process, wait for its end, and return all that it has said from now on."""
    out, errors = await process.communicate(question)
    assert process.returncode is not None
    return ProcessEnd(process.returncode, out.decode(errors="replace"), errors.decode(errors="replace"))


async def run_here(command: Sequence[str], deadline_s: float) -> ProcessEnd:
    """Run a command to its end. Raises ConfigError where it is not done in time."""
    try:
        async with asyncio.timeout(deadline_s), started([*DIE_WITH_PARENT, *command]) as process:
            return await told(process)
    except TimeoutError:
        raise ConfigError(f"{command[0]} was not done after {deadline_s:g} s") from None

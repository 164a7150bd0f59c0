"""Work on threads for coroutines, which may be cancelled where a thread cannot."""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(
    work: Callable[[], T], threads: Executor | None = None, undo: Callable[[T], object] | None = None
) -> T:
    """Return the result of `work`, and raise what it raises. `threads`: by default those of the event loop.

    It ends only when the thread has, also if cancelled: until then the thread uses what the caller's cleanup would give back.
    `undo` is called with a result that no caller gets any more."""
    context = contextvars.copy_context()
    job = asyncio.get_running_loop().run_in_executor(threads, context.run, work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        while not job.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([job])
        if job.exception() is None and undo is not None:
            undo(job.result())
        raise

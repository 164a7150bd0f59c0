"""The thread of a rank in this process: it makes one call after the other, and an event loop waits for what comes of them.

An executor's future has locks of its own, and one of the loop's follows it. Here there is only the loop's."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class StepAnswer(Generic[T]):
    """What the loop that makes it waits for. Any thread may call it, once, with the result or what failed."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def __call__(self, what: T | BaseException) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            self._loop.call_soon_threadsafe(self._settle, what)

    def _settle(self, what: T | BaseException) -> None:
        if self.future.cancelled():
            return
        if isinstance(what, asyncio.CancelledError):
            self.future.cancel()
        elif isinstance(what, BaseException):
            self.future.set_exception(what)
        else:
            self.future.set_result(what)


class RankThread:
    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name="baton-rank", daemon=True)
        self._is_left = False

    def call(self, do: Callable[[], None]) -> None:
        """Have it called behind all that was asked for before. Any thread may ask; after `close` nothing is called any more."""
        if self._thread.ident is None:
            self._thread.start()
        self._calls.put(do)

    def leave(self) -> None:
        """Make no further calls, and wait no more for the one that the thread is in: it may never return."""
        self._is_left = True

    async def close(self) -> None:
        """Make the calls that were asked for, and end the thread."""
        self._calls.put(None)
        if self._thread.ident is not None and not self._is_left:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (do := self._calls.get()) is not None and not self._is_left:
            try:
                do()
            except Exception:
                _log.exception("a call on the rank's thread has failed")
            del do  # nothing of a call outlives it while the next one is awaited

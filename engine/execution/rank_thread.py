"""The thread of a rank in this process: it makes one call after the other, and an event loop waits for each.

An executor's future has locks of its own, and one of the loop's follows it. Here there is only the loop's."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

P = TypeVar("P")
T = TypeVar("T")


class RankThread(Generic[P, T]):
    def __init__(self, do: Callable[[P], T]) -> None:
        """`do` is called on the thread alone."""
        self._do = do
        self._calls = SimpleQueue[tuple[P, asyncio.Future[T]] | None]()
        self._thread = threading.Thread(target=self._run, name="baton-rank", daemon=True)
        self._is_closed = False

    def call(self, given: P) -> asyncio.Future[T]:
        """Have it called behind all that was asked for before. It is not, where the future is cancelled by then."""
        if not self._thread.is_alive():
            self._thread.start()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put((given, future))
        return future

    async def close(self) -> None:
        """Wait for the call that is being made, and end the thread. Later ones are cancelled."""
        self._is_closed = True
        self._calls.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            self._answer(*asked)
            del asked  # nothing of a call outlives it while the next one is awaited

    def _answer(self, given: P, future: asyncio.Future[T]) -> None:
        if future.cancelled():
            return
        settle: Callable[..., Any]
        if self._is_closed:
            settle, what = future.cancel, ()
        else:
            settle, what = self._made(given, future)
        with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            future.get_loop().call_soon_threadsafe(settle, *what)

    def _made(self, given: P, future: asyncio.Future[T]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        try:
            return _settle, (future, self._do(given), None)
        except BaseException as error:
            return _settle, (future, None, error)


def _settle(future: "asyncio.Future[T]", result: T, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)

"""One thread for a disk, which reads before it writes: a prompt waits for what is read, and nobody for what is written."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class ReadsFirst:
    """Reads are done in the order of the calls, and so are writes, when nothing is to be read."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        # The event loop's thread appends, and the other one takes.
        self._reads: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._writes: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    async def read(self, work: Callable[[], T]) -> T:
        """Return what `work` does, which waits for one write at most."""
        return await asyncio.wrap_future(self._put(self._reads, work))

    def before_reads(self, work: Callable[[], object]) -> None:
        """Do `work` before what is read from now on."""
        self._put(self._reads, work)

    def write(self, work: Callable[[], object]) -> None:
        self._put(self._writes, work)

    def close(self) -> None:
        """Close, when all is done. Blocks."""
        self._thread.shutdown(wait=True)

    def _put(
        self, queue: deque[tuple[Future[Any], Callable[[], Any]]], work: Callable[[], Any]
    ) -> Future[Any]:
        answer: Future[Any] = Future()
        queue.append((answer, work))
        self._thread.submit(self._next)
        return answer

    def _next(self) -> None:
        """Do one thing. It is called once for each."""
        answer, work = (self._reads or self._writes).popleft()
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)

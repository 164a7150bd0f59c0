"""How the host learns that work on a device is done: a thread asks, so that nobody who launches work waits for it."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from core.errors import DeviceError
from device.seam import Event

log = logging.getLogger(__name__)

_LEAST_PAUSE_S, _MOST_PAUSE_S = 30e-6, 150e-6
_PATIENCE = 1 / 16
"""A pause is this share of the time for which the event that was asked for last has been waited for. Each question takes the
interpreter's lock, which the thread that launches steps needs."""
_IDLE_S = 5.0
"""After which the thread ends."""
Then = Callable[[Exception | None], None]
"""Called with what failed, if anything did."""
_Asked = tuple[Event, Then, float]
"""An event, whom to tell, and when they asked."""


class Poller:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._asked: list[_Asked] = []
        self._is_asking = False

    def when_done(self, event: Event, then: Then) -> None:
        """Calls `then`, which must not block: at once where the work is done already, else on the poller's thread."""
        if _answer(event, then):
            return
        with self._lock:
            self._asked.append((event, then, time.monotonic()))
            self._lock.notify()
            if self._is_asking:
                return
            self._is_asking = True
        threading.Thread(target=self._run, name="device events", daemon=True).start()

    def wait(self, events: Sequence[Event], timeout_s: float | None = None) -> None:
        """Blocks the calling thread, which launches no steps, until all are done. Raises DeviceError, also for one that is not
        done within `timeout_s`."""
        for event in events:
            over = threading.Event()
            failed: list[Exception] = []

            def then(
                error: Exception | None, over: threading.Event = over, failed: list[Exception] = failed
            ) -> None:
                failed.extend([error] if error else [])
                over.set()

            self.when_done(event, then)
            if not over.wait(timeout_s):
                raise DeviceError(f"work on a device has not ended within {timeout_s:g} s")
            if failed:
                raise failed[0]

    async def done(self, events: Sequence[Event]) -> None:
        """Returns, or is cancelled, only when all are done. Raises DeviceError."""
        if not events:
            return
        loop = asyncio.get_running_loop()
        waits = [loop.create_future() for _ in events]
        for event, future in zip(events, waits, strict=True):
            self.when_done(event, lambda error, future=future: _tell(loop, future, error))
        ended = asyncio.gather(*waits, return_exceptions=True)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await ended
            raise
        for error in ended.result():
            if isinstance(error, BaseException):
                raise error

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._asked and not self._lock.wait(_IDLE_S):
                    self._is_asking = False
                    return
                asked, self._asked = self._asked, []
            if asked and not self._ask(asked):
                with self._lock:
                    self._lock.wait(self._pause_s())  # whoever asks ends it
            asked = []  # an idle thread keeps no event alive

    def _pause_s(self) -> float:
        waits_s = time.monotonic() - max(asked_at for _, _, asked_at in self._asked)
        return min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, _PATIENCE * waits_s))

    def _ask(self, asked: list[_Asked]) -> bool:
        """Return whether any of them was done."""
        left = [each for each in asked if not _answer(each[0], each[1])]
        with self._lock:
            self._asked = left + self._asked
        return len(left) < len(asked)


def _answer(event: Event, then: Then) -> bool:
    """Return whether it is done, and `then` called."""
    error: Exception | None = None
    try:
        if not event.query():
            return False
    except Exception as failed:
        error = failed
    try:
        then(error)
    except Exception:
        log.exception("what waits for a device's work has failed")
    return True


def _tell(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[None]", error: Exception | None) -> None:
    def tell() -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited with it
        loop.call_soon_threadsafe(tell)

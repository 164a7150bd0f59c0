"""Which frames may go into the pool, for receivers whose readers are threads.

Invariant: a frame is either refused or counted as being read from before its first byte enters the pool until after its last,
so that `when_idle` and the ledger's `refuse` (on the event loop's thread) leave no gap for a reader to slip through."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence

from kvtransfer.transport.base import Arrived, MayWrite

Range = tuple[int, int]
"""Offset in the pool and size, in bytes."""


class WriteAdmission:
    """`begin` and `over` are for any thread; the ledger's callbacks run on the event loop's, in order."""

    def __init__(self, may_write: MayWrite, arrived: Arrived, corrupted: Callable[[str], None]) -> None:
        self._may_write, self._arrived, self._corrupted = may_write, arrived, corrupted
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._reading: dict[str, int] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self.num_refused = 0

    def begin(self, grant_id: str, ranges: Sequence[Range]) -> bool:
        """Admit these bytes of the pool to be written now, or refuse them. When it returns True, `over` must follow."""
        with self._lock:
            if not all(self._may_write(grant_id, at, at + size) for at, size in ranges):
                self.num_refused += 1
                return False
            self._reading[grant_id] = self._reading.get(grant_id, 0) + 1
            return True

    def over(self, grant_id: str, num_bytes: int, *, corrupted: bool = False) -> None:
        """Note that a frame is not being read any more. `num_bytes` of it are in the pool; 0 means that it broke off."""
        with self._lock:
            self._reading[grant_id] -= 1
            idle: list[Callable[[], None]] = []
            if not self._reading[grant_id]:
                del self._reading[grant_id]
                idle = self._waiting.pop(grant_id, [])
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the ledger with it
            self._loop.call_soon_threadsafe(self._tell, grant_id, num_bytes, corrupted, idle)

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        with self._lock:
            if grant_id in self._reading:
                self._waiting.setdefault(grant_id, []).append(then)
                return
        then()

    def _tell(
        self,
        grant_id: str,
        num_bytes: int,
        corrupted: bool,  # noqa: FBT001 (a loop calls it)
        idle: list[Callable[[], None]],
    ) -> None:
        for then in idle:
            then()
        if corrupted:
            self._corrupted(grant_id)
        elif num_bytes:
            self._arrived(grant_id, num_bytes)

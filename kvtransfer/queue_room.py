"""Bounds the bytes of KV that wait to be written: the compute thread, which queues them, waits while they are too many."""

import threading
from collections.abc import Callable


class QueueRoom:
    """Shared by the compute thread, which takes, and the event loop's, which gives back."""

    def __init__(self, max_bytes: int = 256 << 20, stall_s: float = 60.0) -> None:
        """A write that takes `stall_s` is given up where there is no room for others."""
        self.stall_s, self._max_bytes, self._num_bytes = stall_s, max_bytes, 0
        self._changed = threading.Condition()
        self.is_awaited = False
        """Whether the compute thread waits for room."""

    def take(self, num_bytes: int, on_stall: Callable[[], object]) -> None:
        """Wait until less than `max_bytes` are queued, and count `num_bytes` more. `on_stall` is called after each `stall_s` of
        waiting."""
        with self._changed:
            self.is_awaited = True
            while not self._changed.wait_for(lambda: self._num_bytes < self._max_bytes, self.stall_s):
                on_stall()
            self.is_awaited = False
            self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._changed:
            self._num_bytes = max(0, self._num_bytes - num_bytes)
            self._changed.notify_all()

"""When Python looks for cyclic garbage in processes that others wait for, and when free memory goes back to the system.

An object to which nothing refers is freed at once. Only objects that refer to each other need a collector. A full collection
looks at all objects of the process, and nothing is answered meanwhile: it takes 150 ms for what Ray, Serve and PyTorch have
loaded, and twice as long for what a scheduler knows of 10,000 instances (`benchmarks/results`)."""

import asyncio
import ctypes
import gc
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_NEVER = 1 << 30
_LOOK_EVERY_S = 5.0
_RETRY_S = 0.001
_one_at_a_time = threading.Lock()


def collect() -> int:
    """Make a full collection that begins now, and return the number of objects that it has found. `gc.collect` does nothing where
    another thread collects, though that one may have looked at the caller's objects before they were garbage."""
    with _one_at_a_time:
        while True:
            num_before = _num_full_collections()
            num_found = gc.collect()
            if _num_full_collections() > num_before:
                return num_found
            time.sleep(_RETRY_S)


def _num_full_collections() -> int:
    return gc.get_stats()[-1]["collections"]


def leave_out_all_there_is() -> None:
    """Leave out of all collections what this process has by now. Call it once, when it has made all that it begins with, and
    before what may go earlier than the process does, such as an instance."""
    collect()
    gc.freeze()


def give_back_memory() -> None:
    """Return freed memory to the system, where the C library can. It takes some milliseconds, without Python's lock."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@contextmanager
def no_search() -> Generator[None]:
    """Switch off the search for garbage where millions of objects live to the end, and no cycle of them is dropped before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class IdleCollector:
    """Makes full collections while nothing waits, or else `at_least_every_s`. Younger objects are collected as ever, which takes
    a few milliseconds at the most. It is for a process whose objects live long or refer to nothing that refers back to them."""

    def __init__(self, is_idle: Callable[[], bool], at_least_every_s: float = 3600.0) -> None:
        self._is_idle, self._at_least_every_s = is_idle, at_least_every_s

    async def run(self, look_every_s: float = _LOOK_EVERY_S) -> None:
        """Run for as long as the process lives, until cancelled; after that the process collects as ever again."""
        before = gc.get_threshold()
        gc.set_threshold(before[0], before[1], _NEVER)
        collected_at = time.monotonic()
        try:
            while True:
                await asyncio.sleep(look_every_s)
                has_news = gc.get_count()[2] > 0
                is_late = time.monotonic() - collected_at >= self._at_least_every_s
                if has_news and (is_late or self._is_idle()):
                    began_at = time.monotonic()
                    num_found = gc.collect()
                    collected_at = time.monotonic()
                    took_ms = (collected_at - began_at) * 1e3
                    log.debug("a full collection took %.0f ms and found %d objects", took_ms, num_found)
        finally:
            gc.set_threshold(*before)

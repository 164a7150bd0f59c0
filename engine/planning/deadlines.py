"""An instant for each of many keys, and which of them are past."""

import heapq
import itertools
from collections.abc import Hashable, Iterator
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_FEW = 64
"""The number of outdated entries that the heap may have however few keys there are."""


class Deadlines(Generic[K]):
    """Invariant: each key has an entry with its instant in the heap. Entries with others are out of date."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._entries: list[tuple[float, int, K]] = []
        """(instant, number of the entry, key); the first instant is at the top."""
        self._numbers = itertools.count()

    @property
    def num_entries(self) -> int:
        """The number of entries, outdated ones included."""
        return len(self._entries)

    @property
    def next_at(self) -> float:
        """The first instant; in the endless future where there is none."""
        while self._entries and not self._is_current(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else inf

    def set(self, key: K, at: float) -> None:
        """Give a key an instant, in place of the one that it had."""
        if len(self._entries) > 2 * len(self._at) + _FEW:
            self._entries = [entry for entry in self._entries if self._is_current(entry)]
            heapq.heapify(self._entries)
        self._at[key] = at
        heapq.heappush(self._entries, (at, next(self._numbers), key))

    def drop(self, key: K) -> None:
        self._at.pop(key, None)

    def take(self, now: float) -> Iterator[K]:
        """Yield each key whose instant has come, the first first, and forget it."""
        while self.next_at <= now:
            _, _, key = heapq.heappop(self._entries)
            del self._at[key]
            yield key

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        return self._at.get(entry[2]) == entry[0]

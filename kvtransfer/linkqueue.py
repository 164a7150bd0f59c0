"""In which order writes share the link: the request whose first token is due earliest goes first, layer by layer. Pure.

Every item is one layer of one chunk (or a last word), so a nearer deadline waits for at most one write to each holder. Items of
one grant keep their order and never overlap, which makes its last word the last; a holder takes one write at a time; and only so
many holders are written to at once, because more would share the link instead of following the deadlines. A holder that does not
get on stops counting against that number (`slow`), so that it does not hold up the others."""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
Urgency = tuple[float, float]
"""(minus the priority, when the first token is due): smaller goes first."""


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """One grant's items, oldest first."""

    holder: str
    urgency: Urgency
    number: int
    items: deque[T] = field(default_factory=deque[T])


class LinkQueue(Generic[T]):
    def __init__(self, max_active: int) -> None:
        self._max_active = max_active
        self._flows: dict[str, _Flow[T]] = {}
        self._waiting: dict[str, list[tuple[Urgency, int, str]]] = {}
        """For each holder a heap of the grants that have items."""
        self._busy: dict[str, bool] = {}
        """Holders with a write under way, and whether it counts."""
        self._count = 0

    def __len__(self) -> int:
        return sum(len(flow.items) for flow in self._flows.values())

    def add(self, grant_id: str, holder: str, urgency: Urgency, item: T) -> None:
        flow = self._flows.get(grant_id)
        if flow is None:
            self._count += 1
            flow = self._flows[grant_id] = _Flow(holder, urgency, self._count)
            heapq.heappush(self._waiting.setdefault(holder, []), (urgency, flow.number, grant_id))
        flow.items.append(item)

    def next(self) -> tuple[str, str, deque[T]] | None:
        """The grant to serve now, its holder and its items, of which the caller takes some from the left until `done`."""
        if sum(self._busy.values()) >= self._max_active:
            return None
        ready = [(heap[0], holder) for holder, heap in self._waiting.items() if holder not in self._busy]
        if not ready:
            return None
        (_, _, grant_id), holder = min(ready)
        self._busy[holder] = True
        return grant_id, holder, self._flows[grant_id].items

    def slow(self, holder: str) -> None:
        """The write under way there takes too long to be waited for."""
        if holder in self._busy:
            self._busy[holder] = False

    def done(self, holder: str, grant_id: str) -> None:
        """The write there is over."""
        del self._busy[holder]
        if not self._flows[grant_id].items:
            flow = self._flows.pop(grant_id)
            heap = self._waiting[holder]
            heap.remove((flow.urgency, flow.number, grant_id))
            heapq.heapify(heap)
            if not heap:
                del self._waiting[holder]

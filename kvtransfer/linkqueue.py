"""The order in which writes share the link: the request whose first token is due earliest goes first, layer by layer.

A holder takes a few writes at once, so that the next one's begin follows the last one's end without a pause, and an earlier
deadline waits for no more than these. Items of one grant keep their order. Only so many holders are written to at once, because
more would share the link instead of following the deadlines. A holder that is slow stops counting against that number (`slow`),
so that it does not hold up the others."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
Urgency = tuple[float, float]
"""(minus the priority, when the first token is due). Smaller goes first."""


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """One grant's items, oldest first."""

    holder: str
    urgency: Urgency
    number: int
    items: deque[T] = field(default_factory=deque[T])

    def entry(self, grant_id: str) -> tuple[Urgency, int, str]:
        return (self.urgency, self.number, grant_id)


@dataclass(slots=True, eq=False)
class Turn(Generic[T]):
    """One write: `items` of a grant that go out together. It lasts until `done` is called."""

    grant_id: str
    holder: str
    items: list[T]
    slow: bool = False


class LinkQueue(Generic[T]):
    def __init__(self, max_active: int, depth: int, take: Callable[[deque[T]], list[T]]) -> None:
        """Up to `max_active` holders are written to at once, each by at most `depth` writes. `take` pops one write's items."""
        self._max_active, self._depth, self._take = max_active, depth, take
        self._flows: dict[str, _Flow[T]] = {}
        self._waiting: dict[str, list[tuple[Urgency, int, str]]] = {}
        """For each holder a heap of the grants that have items."""
        self._under_way: dict[str, list[Turn[T]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return sum(len(flow.items) for flow in self._flows.values())

    def add(self, grant_id: str, holder: str, urgency: Urgency, item: T) -> None:
        flow = self._flows.get(grant_id)
        if flow is None:
            self._count += 1
            flow = self._flows[grant_id] = _Flow(holder, urgency, self._count)
            heapq.heappush(self._waiting.setdefault(holder, []), flow.entry(grant_id))
        flow.items.append(item)

    def drop(self, grant_id: str) -> Sequence[T]:
        """Take a grant's items out. Writes under way are not touched."""
        flow = self._flows.get(grant_id)
        if flow is None:
            return ()
        self._leave(grant_id, flow)
        return flow.items

    def next(self) -> Turn[T] | None:
        """Return the write that may start now, if any."""
        active = sum(not any(turn.slow for turn in turns) for turns in self._under_way.values())
        ready = [
            (heap[0], holder)
            for holder, heap in self._waiting.items()
            if (num := len(self._under_way.get(holder, ()))) < self._depth
            and (num or active < self._max_active)
        ]
        if not ready:
            return None
        (_, _, grant_id), holder = min(ready)
        flow = self._flows[grant_id]
        turn = Turn(grant_id, holder, self._take(flow.items))
        if not flow.items:
            self._leave(grant_id, flow)
        self._under_way.setdefault(holder, []).append(turn)
        return turn

    def done(self, turn: Turn[T]) -> None:
        turns = self._under_way[turn.holder]
        turns.remove(turn)
        if not turns:
            del self._under_way[turn.holder]

    def _leave(self, grant_id: str, flow: _Flow[T]) -> None:
        del self._flows[grant_id]
        heap = self._waiting[flow.holder]
        heap.remove(flow.entry(grant_id))
        heapq.heapify(heap)
        if not heap:
            del self._waiting[flow.holder]

"""Several schedulers at once, each with a part of the requests, as in production: they tell each other what they have placed.

Requests are spread by their ids; instances report to all of them, to each first in its turn (`core.turns`). A word from one
scheduler to another takes `WORD_S`."""

import heapq
from itertools import count
from zlib import crc32

from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_events import Event, RequestArrived, Send, Tick
from core.config.cluster_config import ScheduleConfig
from core.messages import Finished, PeersChanged
from core.reports import LoadReport
from core.turns import TURN_S, in_turn
from sim.coarse.world import Log, MakeScheduler

WORD_S = 0.001
"""A message over TCP and two event loops that have other things to do."""


class Several:
    """sim.coarse.world.Scheduler."""

    def __init__(self, schedulers: dict[str, GlobalScheduler]) -> None:
        self._schedulers = schedulers
        self._names = tuple(schedulers)
        self._later: list[tuple[float, int, str, Event]] = []
        self._numbers = count()
        for name, scheduler in schedulers.items():
            scheduler.on(PeersChanged(name, tuple(other for other in schedulers if other != name)), 0.0)

    @property
    def num_queued(self) -> int:
        return sum(scheduler.num_queued for scheduler in self._schedulers.values())

    def on(self, event: Event, now: float) -> list[Send]:
        actions: list[Send] = []
        while self._later and self._later[0][0] <= now:
            due_at, _, name, word = heapq.heappop(self._later)
            actions += self._tell(name, word, due_at)
        for name in self._hearers(event):
            actions += self._tell(name, event, now)
        if isinstance(event, LoadReport):
            first, *others = in_turn(self._names, event.address, event.seq)
            actions += self._tell(first, event, now)
            for turn, name in enumerate(others, 1):
                self._put(now + turn * TURN_S, name, event)
        return actions

    def _hearers(self, event: Event) -> tuple[str, ...]:
        match event:
            case RequestArrived(_, place):
                return (self._of(place.request_id),)
            case Finished(request_id):
                return (self._of(request_id),)
            case Tick():
                return tuple(name for name in self._names if self._schedulers[name].num_queued)
            case LoadReport():
                return ()
            case _:
                return self._names

    def _of(self, request_id: str) -> str:
        return self._names[crc32(request_id.encode()) % len(self._names)]

    def _tell(self, name: str, event: Event, now: float) -> list[Send]:
        """Carry out its actions, but for messages to the others, which are sent at that time."""
        outside: list[Send] = []
        for action in self._schedulers[name].on(event, now):
            if action.to in self._schedulers:
                self._put(now + WORD_S, action.to, action.message)  # type: ignore[arg-type]
            else:
                outside.append(action)
        return outside

    def _put(self, due_at: float, name: str, event: Event) -> None:
        heapq.heappush(self._later, (due_at, next(self._numbers), name, event))


def several(count: int, scan_up_to: int) -> MakeScheduler:
    """Make `count` production schedulers. Fleets of up to `scan_up_to` instances are considered as a whole."""

    def make(config: ScheduleConfig, log: Log) -> Several:
        names = [f"scheduler-{number}" for number in range(count)]
        return Several({name: GlobalScheduler(config, log=log, scan_up_to=scan_up_to) for name in names})

    return make

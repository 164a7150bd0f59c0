"""Several schedulers at once, each with a part of the requests; what the others have placed it learns from reports alone.

Requests are spread by their ids, as ingresses would spread over schedulers; instances report to all of them."""

from zlib import crc32

from cluster.events import Arrived, Event, Send, Tick
from cluster.routing import GlobalScheduler
from core.config import ScheduleConfig
from core.messages import Finished
from sim.coarse.world import Log, MakeScheduler


class Several:
    """sim.coarse.world.Scheduler."""

    def __init__(self, schedulers: list[GlobalScheduler]) -> None:
        self._schedulers = schedulers

    @property
    def num_queued(self) -> int:
        return sum(scheduler.num_queued for scheduler in self._schedulers)

    def on(self, event: Event, now: float) -> list[Send]:
        match event:
            case Arrived(_, place):
                return self._of(place.request_id).on(event, now)
            case Finished(request_id):
                return self._of(request_id).on(event, now)
            case Tick():
                waiting = [scheduler for scheduler in self._schedulers if scheduler.num_queued]
                return [action for scheduler in waiting for action in scheduler.on(event, now)]
            case _:
                return [action for scheduler in self._schedulers for action in scheduler.on(event, now)]

    def _of(self, request_id: str) -> GlobalScheduler:
        return self._schedulers[crc32(request_id.encode()) % len(self._schedulers)]


def several(count: int, scan_up_to: int) -> MakeScheduler:
    """`count` production schedulers; fleets of up to `scan_up_to` instances are looked at as a whole."""

    def make(config: ScheduleConfig, log: Log) -> Several:
        return Several([GlobalScheduler(config, log=log, scan_up_to=scan_up_to) for _ in range(count)])

    return make

"""Which requests wait, and which are refused: at once, because the wait can be foreseen, or after having waited too long.

Invariant: a request is in the queue, or it has been answered, or it was withdrawn."""

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Final

from cluster.scheduler.queue.drain_rate import DrainRate
from cluster.scheduler.queue.fairness import ServiceCounters
from cluster.scheduler.queue.hopeless import HopelessRule, IdleEstimate
from cluster.scheduler.queue.waiting_queue import Waiter, WaitingQueue
from cluster.scheduler.scheduler_events import Send
from core.config.cluster_config import ScheduleConfig
from core.messages import PlaceRequest, Rejected
from core.scheduler_tuning import SchedulerTuning
from core.sleep_messages import ArrivedDemand, ModelDemand, WaitingDemand
from core.types import Slo

_MAX_LOTS: Final = 64
_MAX_CLASSES: Final = 64
NO_DECODE_WAIT_S: Final = 5.0
"""How long new requests wait for the first decode instance, since instances may be restarting."""
BEGUN_WAIT_S = 60.0
"""How long a request waits for one after its own was lost (attempt 1 and later): its client may have tokens already."""


class Admission:
    def __init__(
        self,
        config: ScheduleConfig,
        counters: ServiceCounters,
        log: Callable[[str], None],
        tuning: SchedulerTuning,
    ) -> None:
        self._config, self._log, self._tuning = config, log, tuning
        self.queue = WaitingQueue(counters, config.aging_s, tuning)
        self._drain = DrainRate(tuning)
        self._hopeless = HopelessRule(tuning)
        self._num_arrived = 0
        self._arrived: dict[tuple[int, float], int] = {}
        """How many requests have come of each priority and target."""
        self._no_decode_since: float | None = None
        self.num_schedulers = 1
        """The number of schedulers that share the instances, and the limit on waiting requests."""

    def enter(
        self, key: str, frontend: str, place: PlaceRequest, work_s: float, num_instances: int, now: float
    ) -> Waiter:
        """Put a request in. `work_s` is the least time that its prompt takes. `num_instances` compute prompts."""
        self._num_arrived += 1
        self._note_arrived(place)
        slo_s = place.slo.ttft_s
        due_at = inf if place.attempt else now + slo_s
        start_by = inf if due_at == inf else due_at - self._tuning.start_share * slo_s - work_s
        waiter = Waiter(
            key,
            frontend,
            place,
            now,
            number=self._num_arrived,
            start_by=start_by,
            due_at=due_at,
            work_s=work_s,
            tuning=self._tuning,
        )
        self.queue.add(waiter)
        self.queue.shed(max(1, num_instances) / self.num_schedulers, now)
        return waiter

    @property
    def _max_queued(self) -> int:
        return max(1, self._config.max_queued_requests // self.num_schedulers)

    def left(self, num_placed: int, now: float, *, serves: bool) -> None:
        """Note, after each event, how many requests were just placed. While nothing `serves`, since it sleeps or is lost, waiting
        says nothing of how fast the queue drains."""
        self._drain.observe(len(self.queue) if serves else 0, num_placed, now)
        self._hopeless.observe(now, some_wait_in_time=self.queue.timely_level() is not None)

    def never(self, key: str, frontend: str, place: PlaceRequest, largest_tokens: int) -> Send:
        """Refuse a request for good, since no instance can hold it."""
        reason = (
            f"{place.num_tokens + place.max_new_tokens} tokens (prompt and output) do not fit: "
            f"the largest instance holds {largest_tokens} of one sequence"
        )
        return self._reject(key, frontend, place, reason, 0.0)

    def refuses_hopeless(self, place: PlaceRequest, now: float) -> bool:
        """Return whether a hopeless request is refused now."""
        return self._hopeless.holds_for(place, now)

    def hopeless(self, key: str, frontend: str, place: PlaceRequest, estimate: IdleEstimate) -> Send:
        """Refuse a request that no instance could answer in time."""
        slo = place.slo
        reason = (
            f"the first token after {place.num_tokens} tokens takes about {estimate.ttft_s:.2g} s on an idle instance, and the "
            f"class {slo.name!r} wants it in {slo.ttft_s:g} s: ask for a class with more time, or send a shorter prompt"
        )
        self._log(f"reject {key} hopeless")
        return Send(frontend, Rejected(place.request_id, place.attempt, reason, 0.0, estimate.ttft_s))

    def refuses_sleeping(self, place: PlaceRequest, why_not: str, wake_s: float) -> bool:
        """Return whether a request is refused since the model sleeps: for `wake_s` more, or for good (`why_not`). A request
        that was admitted before waits in any case."""
        slo = place.slo
        limit_s = slo.ttft_s if slo.hopeless == "refuse" else self._longest_wait_s(slo)
        return not place.attempt and (bool(why_not) or wake_s > limit_s)

    def sleeping(self, key: str, frontend: str, place: PlaceRequest, why_not: str, wake_s: float) -> Send:
        """Return the refusal, which says when the model will be awake, or why it will not."""
        reason = why_not or (
            f"the model sleeps, and wakes up in about {wake_s:.2g} s, for which the class {place.slo.name!r} does not wait"
        )
        self._note_arrived(place)
        return self._asleep(key, frontend, place, reason, 0.0 if why_not else max(1.0, wake_s))

    def _asleep(self, key: str, frontend: str, place: PlaceRequest, why: str, retry_after_s: float) -> Send:
        self._log(f"reject {key} asleep")
        return Send(frontend, Rejected(place.request_id, place.attempt, why, retry_after_s, asleep=True))

    def demand(self, model: str, num_running: int, now: float) -> ModelDemand:
        """Return what the model is asked for. Its state is left open."""
        found = Counter[tuple[int, int]]()
        age = 0.0
        for waiter in self.queue:
            limit_s = self._limit_s(waiter)
            due_at = waiter.due_at if waiter.due_at < inf else waiter.arrived_at + limit_s
            found[waiter.place.slo.priority, round(due_at - now)] += 1
            age = max(age, (now - waiter.arrived_at) / limit_s)
        first = sorted(found.items(), key=lambda lot: lot[0][1])[:_MAX_LOTS]
        return ModelDemand(
            model=model,
            state="unknown",
            waiting=tuple(WaitingDemand(priority, num, left_s) for (priority, left_s), num in first),
            arrived=tuple(ArrivedDemand(*key, num) for key, num in self._arrived.items()),
            num_running=num_running,
            age=age,
        )

    def _note_arrived(self, place: PlaceRequest) -> None:
        key = place.slo.priority, min(place.slo.ttft_s, self._longest_wait_s(place.slo))
        if key in self._arrived or len(self._arrived) < _MAX_CLASSES:
            self._arrived[key] = self._arrived.get(key, 0) + 1

    def refuse_excess(self, waiter: Waiter, now: float) -> list[Send]:
        """Refuse the newcomer if it would wait too long, or the last in order if too many wait.

        Requests that go on after a lost instance were admitted before, and are never refused for load on arrival."""
        if self.queue.get(waiter.key) is None:
            return []
        if len(self.queue) > self._max_queued:
            last = self.queue.last_refusable()
            return [] if last is None else [self._refuse(last, f"{len(self.queue)} requests wait", now)]
        wait_s = self._drain.wait_s(self.queue.num_ahead(waiter), now)
        if waiter.place.attempt == 0 and wait_s > self._limit_s(waiter):
            return [self._refuse(waiter, f"it would wait about {wait_s:.0f} s for a place", now)]
        return []

    def expire(self, why_not: str, now: float, *, is_asleep: bool = False) -> list[Send]:
        """Refuse those that have waited too long, for a place or for an instance that does not come (`why_not`). While the model
        `is_asleep`, those that were paused by that wait on, and others are refused where no request wakes it (`why_not`)."""
        if why_not and is_asleep:
            return self._reject_held(why_not)
        if why_not:
            self._no_decode_since = now if self._no_decode_since is None else self._no_decode_since
            return self._reject_alone(why_not, self._no_decode_since, now)
        self._no_decode_since = None
        late = [
            w
            for w in self.queue
            if now - w.arrived_at > self._limit_s(w) and not (is_asleep and w.place.attempt)
        ]
        return [self._refuse(w, f"no place was free for {self._limit_s(w):g} s", now) for w in late]

    def _reject_held(self, why_not: str) -> list[Send]:
        waiting = [waiter for waiter in self.queue if not waiter.place.attempt]
        for waiter in waiting:
            self.queue.remove(waiter)
        return [self._asleep(w.key, w.frontend, w.place, why_not, 0.0) for w in waiting]

    def _reject_alone(self, why_not: str, since: float, now: float) -> list[Send]:
        """Refuse what has waited too long for a decode instance, of which there is none `since` then."""
        alone = [
            w
            for w in self.queue
            if now - max(since, w.arrived_at) >= (BEGUN_WAIT_S if w.place.attempt else NO_DECODE_WAIT_S)
        ]
        for waiter in alone:
            self.queue.remove(waiter)
        return [self._reject(w.key, w.frontend, w.place, why_not, NO_DECODE_WAIT_S) for w in alone]

    def _limit_s(self, waiter: Waiter) -> float:
        """Return how long it may wait. A class whose first token may take longer than other requests wait has that long."""
        return self._longest_wait_s(waiter.place.slo)

    def _longest_wait_s(self, slo: Slo) -> float:
        longest_s = self._config.max_queue_wait_s
        return longest_s if slo.ttft_s == inf else max(longest_s, slo.ttft_s)

    def _refuse(self, waiter: Waiter, reason: str, now: float) -> Send:
        """Take a waiter out of the queue and answer 429 with when to come back."""
        config = self._config
        retry_after_s = self._drain.retry_after_s(
            len(self.queue), self._max_queued, config.max_queue_wait_s, now
        )
        self.queue.remove(waiter)
        reason = f"the cluster is busy: {reason}"
        return self._reject(waiter.key, waiter.frontend, waiter.place, reason, retry_after_s)

    def _reject(
        self, key: str, frontend: str, place: PlaceRequest, reason: str, retry_after_s: float
    ) -> Send:
        self._log(f"reject {key} {'later' if retry_after_s else 'never'}")
        return Send(frontend, Rejected(place.request_id, place.attempt, reason, retry_after_s))

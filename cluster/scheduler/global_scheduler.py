"""The global scheduler: where each request runs, or that it must wait or come back later.

Invariants:
- The queue lives here, and a request is bound to instances as late as possible (`placer`).
- Every RequestArrived is answered by exactly one PlaceReply or Rejected, unless its frontend finishes it or is lost before.
  Frontends that ask for the same request get the same answer (`askers`).
- What was reserved to an instance is given back when the request is Finished, its frontend or that instance is lost.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from cluster.scheduler.expert_totals import total
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.roster import SCAN_UP_TO, Roster
from cluster.scheduler.placement.placement import Placement
from cluster.scheduler.placement.placement_policy import PlacementPolicy
from cluster.scheduler.placement.placer import Placer
from cluster.scheduler.placement.shadow_policy import policy_of
from cluster.scheduler.queue.admission import Admission
from cluster.scheduler.queue.askers import Askers
from cluster.scheduler.queue.fairness import ServiceCounters
from cluster.scheduler.queue.waiting_queue import Waiter
from cluster.scheduler.residency.residency import Residency
from cluster.scheduler.scheduler_events import (
    Event,
    OperatorAsked,
    PeerLost,
    PrefillNeeded,
    RequestArrived,
    RequestLeft,
    Send,
    Tick,
)
from cluster.scheduler.scheduler_peers import SchedulerPeers
from core.config.cluster_config import ScheduleConfig
from core.messages import (
    Finished,
    Leaving,
    PeerRequest,
    PeersChanged,
    PlacedByPeer,
    PlaceReply,
    PlaceRequest,
    PrefillAssigned,
    ReleasedByPeer,
)
from core.reports import LoadReport, Register, Status
from core.scheduler_tuning import SchedulerTuning, tuned
from core.sleep_messages import Asleep, GroupOrder, KeepAwake, ModelDemand
from core.types import Route


class GlobalScheduler:
    """Decides on events. Feed it events in the order in which they happen, with `now` never going back, and carry out the actions
    it returns.

    `log` gets one line for each decision, without times: two runs with the same events in the same order give the same lines. In
    fleets of more than `scan_up_to` instances only a few are considered for each request (`shortlist`)."""

    def __init__(
        self,
        config: ScheduleConfig,
        policy: PlacementPolicy | None = None,
        log: Callable[[str], None] | None = None,
        scan_up_to: int = SCAN_UP_TO,
        tuning: SchedulerTuning | None = None,
    ) -> None:
        """`tuning` replaces the configuration's."""
        log = log or _ignore
        tuning = tuning or tuned(config.tuning)
        self._policy = policy or policy_of(config, tuning)
        self._tuning = tuning
        self._settle_s = tuning.settle_reports * config.report_interval_s + tuning.settle_s
        self._roster = Roster(scan_up_to, tuning)
        self._peers = SchedulerPeers()
        self._told = PeerRequest("", "", None)
        """The last message to the other schedulers."""
        self._led = True
        self._num_prefills = 0
        self._num_hung = 0
        self._residency = Residency(config.residency)
        counters = ServiceCounters(config.fairness_slack, tuning)
        self._admission = Admission(config, counters, log, tuning)
        threshold = config.local_threshold_tokens
        self._placer = Placer(
            self._roster, self._policy, threshold, counters, self._peers, log, tuning=tuning
        )
        self._askers = Askers(self._admission.queue.get, self._placer.get)

    @property
    def num_queued(self) -> int:
        return len(self._admission.queue)

    @property
    def queued_tokens(self) -> int:
        """Tokens of the prompts that wait, cached or not."""
        return sum(waiter.place.num_tokens for waiter in self._admission.queue)

    @property
    def num_placed(self) -> int:
        return len(self._placer)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return what is placed and not finished, in the order in which it was placed."""
        return self._placer.placements

    @property
    def members(self) -> tuple[Member, ...]:
        """The living instances, in order of registration."""
        return self._roster.members

    @property
    def leads(self) -> bool:
        """Whether it is the one that does what only one of several schedulers may do."""
        return self._peers.leads

    @property
    def peer_schedulers(self) -> tuple[str, ...]:
        return self._peers.others

    def why_not(self) -> str:
        """Return why a request that came now would not be answered; empty where it would be (a 429 under load is an answer,
        too), perhaps after the model has woken up."""
        return self._residency.why_not() if self._is_asleep else self._roster.why_not()

    @property
    def _is_asleep(self) -> bool:
        """Whether nothing decodes since what does so sleeps."""
        return self._residency.is_asleep and bool(self._roster.why_not())

    @property
    def needs_time(self) -> bool:
        """Whether it is to be told of time that passes, by `Tick`."""
        return self.num_queued > 0 or self._residency.needs_time

    def status(self, nonce: int = 0) -> Status:
        instances = tuple(member.status() for member in self._roster.members)
        experts = total(member.experts for member in self._roster.members)
        return Status(
            nonce=nonce,
            why_not=self.why_not(),
            num_queued=self.num_queued,
            instances=instances,
            experts=experts,
            num_hung=self._num_hung,
            sleepers=self._residency.sleepers,
        )

    def on(self, event: Event, now: float) -> list[Send]:
        """Take one fact in, and return what follows from it, in the order to be sent."""
        actions = self._askers.told(self._react(event, now))
        num_here = (len(self._placer), self.num_queued)
        actions += self._residency.look(self._roster.members, num_here, now, leads=self.leads)
        keeps = self._placer.claimed
        timely_level = self._admission.queue.timely_level() if self._peers.others else None
        if keeps != self._told.keeps or timely_level != self._told.timely_level:
            self._told = PeerRequest(self._peers.me, keeps, timely_level)
            actions += self._tell(self._told)
        return actions

    def _react(self, event: Event, now: float) -> list[Send]:
        match event:
            case RequestArrived():
                return self._on_arrived(event.frontend, event.place, now)
            case Finished() | RequestLeft():
                return self._on_end(event, now)
            case Register():
                return self._on_register(event, now) + self._pair() + self._place_waiting(now)
            case Leaving(address, hung):
                self._num_hung += hung
                self._roster.leave(address)
                self._placer.unclaim(address)
                return self._pair() + self._place_waiting(now)
            case LoadReport():
                return self._on_report(event, now)
            case PeerLost(address):
                return self._on_lost(address) + self._pair() + self._place_waiting(now)
            case PrefillNeeded(decode, need):
                key = _key(need.request_id, need.attempt)
                prefill = self._placer.replace_prefill(key, decode, need, now)
                answer = PrefillAssigned(need.request_id, need.attempt, need.epoch, prefill)
                return [Send(decode, answer), *self._place_waiting(now)]
            case Tick():
                expired = self._admission.expire(self.why_not(), now, is_asleep=self._is_asleep)
                return expired + self._place_waiting(now)
            case Asleep() | KeepAwake() | OperatorAsked() | GroupOrder() as said:
                return self._on_sleep(said, now)
            case word:
                return self._on_word(word, now)

    def _on_sleep(self, event: Asleep | KeepAwake | OperatorAsked | GroupOrder, now: float) -> list[Send]:
        sends = self._residency.on(event, self._roster.members, now)
        if isinstance(event, Asleep):
            self._roster.leave(event.address)
            self._placer.unclaim(event.address)
            sends += self._on_lost(event.address, sleeps=True) if event.state != "falling asleep" else []
            sends += self._pair()
        return sends

    def demand(self, model: str, num_instances: int, now: float) -> ModelDemand:
        """Return what the model, which has `num_instances` instances, asks of the group with which it shares memory."""
        asked = self._admission.demand(model, len(self._placer), now)
        return self._residency.completed(asked, self._roster.members, num_instances, now)

    def _on_word(
        self, word: PeersChanged | PlacedByPeer | ReleasedByPeer | PeerRequest, now: float
    ) -> list[Send]:
        match word:
            case PeersChanged():
                return self._meet(word)
            case PlacedByPeer():
                return self._on_placed(word, now)
            case PeerRequest():
                self._peers.hear(word)
                return self._place_waiting(now)
            case ReleasedByPeer():
                key = _key(word.request_id, word.attempt)
                placement = self._placer.get(key)
                if placement is None or placement.scheduler != word.scheduler:
                    return []
                ended = Finished(word.request_id, word.attempt, word.num_output_tokens, word.complete)
                self._askers.forget(key)
                self._placer.finish(key, ended)
                return self._place_waiting(now)

    def _on_placed(self, word: PlacedByPeer, now: float) -> list[Send]:
        """Take over what another scheduler has placed. Frontends that wait here for the same get that place."""
        key = _key(word.place.request_id, word.place.attempt)
        self._placer.take(key, word, now)
        if (waiter := self._admission.queue.get(key)) is None:
            return []
        self._admission.queue.remove(waiter)
        others = self._askers.follow(key, word.frontend, waiter.frontend)
        return [Send(frontend, _placed(word.place, word.route)) for frontend in others]

    def _meet(self, peer_schedulers: PeersChanged) -> list[Send]:
        """Tell new schedulers of everything that was placed here."""
        news = self._peers.meet(peer_schedulers)
        self._admission.num_schedulers = self._peers.num_placing
        words: list[PlacedByPeer | PeerRequest] = [
            placed.told_by(self._peers.me) for placed in self._placer.placements if not placed.scheduler
        ]
        if self._told.keeps or self._told.timely_level is not None:
            words.append(PeerRequest(peer_schedulers.me, self._told.keeps, self._told.timely_level))
        return [Send(other, word) for other in news for word in words] + self._pair()

    def _tell(self, word: PlacedByPeer | ReleasedByPeer | PeerRequest) -> list[Send]:
        return [Send(other, word) for other in self._peers.others]

    def _pair(self) -> list[Send]:
        """Tell the instances whose buddy has changed, or all of them where this scheduler begins to lead."""
        if self._peers.leads and not self._led:
            self._roster.forget_buddies()
        self._led = self._peers.leads
        news = self._roster.pair()
        return news if self._led else []

    def _on_arrived(self, frontend: str, place: PlaceRequest, now: float) -> list[Send]:
        key = _key(place.request_id, place.attempt)
        if (known := self._placer.get(key)) is not None:
            self._askers.join(key, known.frontend, frontend)
            return [Send(frontend, _placed(known.place, known.route))]
        if (waiter := self._admission.queue.get(key)) is not None:
            self._askers.join(key, waiter.frontend, frontend)
            return []
        if 0 < self._roster.largest_tokens < place.num_tokens + place.max_new_tokens:
            return [self._admission.never(key, frontend, place, self._roster.largest_tokens)]
        if self._is_asleep:
            why_not, wake_s = self._residency.why_not(), self._residency.wake_s(now)
            if self._admission.refuses_sleeping(place, why_not, wake_s):
                wakes = self._residency.wake_for_request(now)
                return [*wakes, self._admission.sleeping(key, frontend, place, why_not, wake_s)]
        if (estimate := self._placer.hopeless(place)) is not None:
            if self._admission.refuses_hopeless(place, now):
                return [self._admission.hopeless(key, frontend, place, estimate)]
            if self._tuning.hopeless_give_way:
                place = replace(place, slo=place.slo.giving_way())
        work_s = self._placer.least_work_s(place)
        waiter = self._admission.enter(
            key, frontend, place, work_s, self._num_prefills or len(self._roster.members), now
        )
        return self._place_waiting(now) + self._admission.refuse_excess(waiter, now)

    def _place_waiting(self, now: float, changed: Member | None = None) -> list[Send]:
        """Place all that can be placed now, in order. Where only `changed` has news, requests that found no headroom before try
        only that."""
        actions: list[Send] = []
        placed_keys: list[str] = []
        queue = self._admission.queue
        passed, closed, num_levels = dict[int, int](), set[int](), queue.num_levels
        lacking = set[tuple[str, int]]()
        """Lines of which one in front found no slot in time."""
        self._placer.check_claim(queue)
        for waiter in queue.in_order(now) if len(queue) else ():
            level = waiter.level
            if level not in closed and not self._may_place(waiter, passed):
                closed.add(level)
                if len(closed) == num_levels:
                    break
            if level in closed or self._placer.can_wait(waiter, now):
                continue
            blocked = self._yields(waiter, now) or self._placer.is_blocked(waiter, changed, now)
            may_be_early = lacking <= {waiter.line} or not self._tuning.fair_early
            route = None if blocked else self._placer.try_to_place(waiter, now, may_be_early=may_be_early)
            if route is None:
                passed[level] = passed.get(level, 0) + 1
                if waiter.lacks_slot:
                    lacking.add(waiter.line)
            else:
                queue.served(waiter, now)
                actions.append(Send(waiter.frontend, _placed(waiter.place, route)))
                placed_keys.append(waiter.key)
        self._admission.left(len(placed_keys), now, serves=self._roster.num_decoding > 0)
        if self._peers.others:
            for key in placed_keys:
                if (placed := self._placer.get(key)) is not None:
                    actions += self._tell(placed.told_by(self._peers.me))
        return actions

    def _may_place(self, waiter: Waiter, passed: Mapping[int, int]) -> bool:
        """Return whether it is worth trying this request, and others of its level, after so many were passed on each."""
        priority = waiter.place.slo.priority
        if passed.get(waiter.level, 0) >= self._tuning.max_passed:
            return False
        if not self._admission.queue.num_ending_with_prompt and not self._roster.any_headroom(priority):
            return False
        return not passed or self._placer.any_prompt_room(priority, timed=waiter.place.slo.is_timed)

    def _yields(self, waiter: Waiter, now: float) -> bool:
        """Return whether a request that is late or deferred must wait for others that can still be in time, whichever scheduler
        has those. It does not wait for ever, nor for those of a tenant that has had much more."""
        if waiter.is_behind or not self._peers.others_in_time(waiter.level):
            return False
        if now - waiter.due_at > self._tuning.yield_s:
            return False
        return waiter.deferred or now > waiter.start_by

    def _on_end(self, event: Finished | RequestLeft, now: float) -> list[Send]:
        ended = event.ended if isinstance(event, RequestLeft) else event
        key = _key(ended.request_id, ended.attempt)
        if isinstance(event, RequestLeft) and self._askers.leave(key, event.frontend) and not ended.complete:
            return []
        return self._finish(key, ended) + self._place_waiting(now)

    def _finish(self, key: str, ended: Finished | None = None) -> list[Send]:
        """Finish a request, here and wherever it counts."""
        self._askers.forget(key)
        if (waiter := self._admission.queue.get(key)) is not None:
            self._admission.queue.remove(waiter)
        placed = self._placer.finish(key, ended)
        if placed is None or placed.scheduler or not self._peers.others:
            return []
        return self._tell(placed.released_by(self._peers.me, ended))

    def _on_register(self, info: Register, now: float) -> list[Send]:
        lost: list[Send] = []
        if not self._roster.knows(info):
            lost = self._on_lost(info.address) if self._roster.get(info.address) is not None else []
            self._roster.add(info)
            self._residency.serves(info.address, now)
            self._num_prefills += info.prefills
        self._roster.forget_buddy(info.address)
        return lost

    def _on_report(self, report: LoadReport, now: float) -> list[Send]:
        member = self._roster.report(report, settled_before=now - self._settle_s)
        if member is not None:
            self._policy.measured(member)
        self._placer.grown(report.grown)
        return self._place_waiting(now, member)

    def _on_lost(self, address: str, *, sleeps: bool = False) -> list[Send]:
        """Note that an instance, a frontend or another scheduler is gone, and with it the requests that it decoded, asked for or
        placed. `sleeps`: an instance is there, but serves no more."""
        if not sleeps:
            self._residency.lost(address)
        if (member := self._roster.get(address)) is not None:
            self._num_prefills -= member.info.prefills
        self._roster.remove(address)
        self._placer.unclaim(address)
        self._askers.lose(address)
        queued = [waiter.key for waiter in self._admission.queue if waiter.frontend == address]
        self._peers.lose(address)
        self._admission.num_schedulers = self._peers.num_placing
        return [send for key in self._placer.at(address) + queued for send in self._finish(key)]


def _placed(place: PlaceRequest, route: Route) -> PlaceReply:
    return PlaceReply(place.request_id, place.attempt, route, place.slo)


def _key(request_id: str, attempt: int) -> str:
    return f"{request_id}#{attempt}"


def _ignore(_: str) -> None:
    pass

"""The coarse simulation's events: arrivals, messages with their latency, the devices' steps and reports, in order of time.

The scheduler is the production one (or a baseline behind the same two methods) and gets what it gets in production: Register,
RequestArrived, LoadReport, Finished, Tick. The fleet has served before: each instance reports at once what it has learned of its
step times."""

import heapq
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_events import Event, RequestArrived, Send, Tick
from core.config.cluster_config import ScheduleConfig
from core.garbage import no_search
from core.messages import Finished, PlaceReply, PlaceRequest, Rejected
from core.pacing.overcommit import overcommit_blocks
from core.ports import SchedulerPolicy
from core.reports import Register
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning
from decode.headroom_policy import HeadroomPolicy
from prefill.deadline_policy import DeadlinePolicy
from sim.catalogue.cost import LinkCost, ModelledStep, SharedCost, StepCost
from sim.coarse.card import Card
from sim.coarse.device import Device
from sim.coarse.device_config import DeviceConfig
from sim.coarse.learned import learned
from sim.coarse.sending_device import SendingDevice
from sim.coarse.simulated_sequence import SimulatedRequest, SimulatedSequence
from sim.simulated_run import HOST, SETTLE_S, STAGGER_S

_TICK_S = 0.1
_ASK_S = 1.0
_LOOKS_OF_AN_EVENT = 4
"""An event takes as long as so many looks of the scheduler at requests that wait: measured with the loads of
`benchmarks.goodput plan_questions`."""
_MOST_LOOKED_AT = 32
"""The number of those that it looks at with an event, at most."""
_FRONTEND = "frontend"
_FIRST_OUTPUT_BLOCK = 1 << 31


class PlacingScheduler(Protocol):
    """What the simulation asks of a scheduler; cluster.scheduler.global_scheduler.GlobalScheduler is one."""

    @property
    def num_queued(self) -> int: ...
    def on(self, event: Event, now: float) -> list[Send]: ...


Log = Callable[[str], None]
MakeScheduler = Callable[[ScheduleConfig, Log], PlacingScheduler]


def production(config: ScheduleConfig, log: Log) -> PlacingScheduler:
    return GlobalScheduler(config, log=log)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Instances of one kind."""

    num_prefill: int
    num_decode: int
    num_both: int
    num_blocks: int
    step: ModelledStep
    link: LinkCost
    cards: str = ""
    """The first instances of all groups with this name share a card, and so do the second ones, and so on. Their steps are
    `sim.catalogue.cost.SharedCost`. Without a name instances have cards of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseConfig:
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    """Instances that register for either role."""
    block_tokens: int = 64
    num_blocks: int = 4096
    kv_token_bytes: int = 131_072
    state_blocks: int = 0
    """Blocks that each sequence takes for its recurrent state."""
    host_blocks: int = 0
    """Blocks that host memory keeps for each instance, from which preempted sequences come back."""
    host_bytes_per_s: float = 25e9
    num_layers: int = 32
    max_batch_tokens: int = 512
    max_num_seqs: int = 64
    step: ModelledStep = field(default_factory=StepCost)
    link: LinkCost = field(default_factory=LinkCost)
    reports_links: bool = True
    """False: the scheduler has to assume how fast links are, and reserves none."""
    message_s: float = 0.0002
    lookahead: bool = True
    mixed_batch_tokens: int = 0
    """A bound on the tokens of a step that decodes too, in place of the worker policy's; 0: the policy's."""
    asked_tokens: int = 0
    """As many tokens of output every request allows, as far as they fit: a client does not know how long its own becomes. 0: as
    many as it gets."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    tuning: SchedulerTuning = DEFAULT_TUNING
    """What instances decide by; a scheduler has its own."""
    knows_experts: bool = True
    """Whether instances learn how many routed experts steps read."""
    cards: str = ""
    """As in `DeviceGroup`."""
    others: tuple[DeviceGroup, ...] = ()
    """Further instances, of the same model on other devices."""

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        own = DeviceGroup(
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            num_both=self.num_both,
            num_blocks=self.num_blocks,
            step=self.step,
            link=self.link,
            cards=self.cards,
        )
        return (own, *self.others)

    @property
    def num_instances(self) -> int:
        return sum(group.num_prefill + group.num_decode + group.num_both for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseOutcome:
    jobs: tuple[SimulatedRequest, ...]
    """Empty where the jobs were made as they arrived."""
    decisions: tuple[str, ...]
    num_events: int
    work: int
    """What the run has taken, counted in events without a queue, wherever it ran. With a queue each takes longer."""
    num_steps: int
    busy_share: float
    """Return the share of all instances' time until the last token in which they were busy."""


def simulate(
    config: CoarseConfig,
    jobs: Iterable[SimulatedRequest],
    make_scheduler: MakeScheduler = production,
    advanced: Callable[[int], None] = lambda _: None,
    *,
    ends_at: float = float("inf"),
    enough: Callable[[float], bool] = lambda _: False,
    most_work: int = sys.maxsize,
) -> CoarseOutcome:
    """Serve `jobs` (which are changed) until all have ended, or `ends_at`, or `enough(now)`, or after `most_work`. The last two
    are looked at every second. `advanced` hears how many arrivals there were, now and then. Jobs that are made as they
    arrive (`sim.coarse.coarse_workload.arriving`) are kept by who makes them, if at all.

    Raises Bug when an instance's block accounting is off at the end."""
    with no_search():
        world = _World(config, make_scheduler, enough, most_work)
        world.run(jobs, advanced, ends_at)
    for device in world.devices.values():
        device.check_integrity()
    busy_s = sum(device.busy_s for device in world.devices.values())
    return CoarseOutcome(
        jobs=tuple(jobs) if isinstance(jobs, Sequence) else (),
        decisions=tuple(world.decisions),
        num_events=world.num_events,
        work=world.work,
        num_steps=sum(device.num_steps for device in world.devices.values()),
        busy_share=busy_s / max(1e-9, world.last_at * config.num_instances),
    )


class _World:
    """sim.coarse.device.Surroundings."""

    def __init__(
        self,
        config: CoarseConfig,
        make_scheduler: MakeScheduler,
        enough: Callable[[float], bool],
        most_work: int,
    ) -> None:
        self._config, self._enough, self._most_work = config, enough, most_work
        self._is_over, self._ask_at = False, 0.0
        self.now = 0.0
        self.last_at = 0.0
        """When the last token so far was seen."""
        self.num_events = 0
        self._num_looked_at = 0
        self.decisions: list[str] = []
        self.devices: dict[str, Device] = {}
        self._cards: dict[str, Card] = {}
        self._scheduler = make_scheduler(config.schedule, self.decisions.append)
        self._jobs: dict[str, SimulatedRequest] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_pushed = 0
        self._num_ids = _FIRST_OUTPUT_BLOCK
        self._most_tokens = 0
        """What the largest instance that decodes can hold."""
        self._reporting: set[str] = set()
        self._phase_s: dict[str, float] = {}
        self._ticking = False
        self._add_devices()

    def run(self, jobs: Iterable[SimulatedRequest], advanced: Callable[[int], None], ends_at: float) -> None:
        for number, job in enumerate(jobs):
            self._pass(min(job.request.arrival_at, ends_at))
            if job.request.arrival_at > ends_at or self._is_over:
                return
            self._arrive(job)
            if number % 64 == 0:
                advanced(number)
        self._pass(ends_at)

    @property
    def work(self) -> int:
        """Return what the run has taken so far, counted in events without a queue."""
        return self.num_events + self._num_looked_at // _LOOKS_OF_AN_EVENT

    def _pass(self, ends_at: float) -> None:
        """Process all events that are due."""
        heap = self._heap
        while heap and heap[0][0] <= ends_at:
            self.now, _, call, args = heapq.heappop(heap)
            self.num_events += 1
            call(self.now, *args)
            if self.now >= self._ask_at:
                self._ask_at = self.now + _ASK_S
                if self._enough(self.now) or self.work >= self._most_work:
                    self._is_over = True
                    return

    def at(self, due_at: float, call: Callable[..., None], *args: object) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (due_at, self._num_pushed, call, args))

    def device(self, address: str) -> Device:
        return self.devices[address]

    def new_block_id(self) -> int:
        self._num_ids += 1
        return self._num_ids

    def tokens(self, job: SimulatedRequest, now: float, num_tokens: int) -> None:
        seen_at = now + self._config.message_s
        job.first_at = min(job.first_at, seen_at)
        if num_tokens >= job.max_tokens and job.num_output < num_tokens:
            job.last_at = seen_at
            self.last_at = max(self.last_at, seen_at)
            self.at(
                seen_at + self._config.message_s,
                self._feed,
                Finished(job.request.id, 0, num_tokens, complete=True),
            )
            self._go_on(job, seen_at)
        job.num_output = max(job.num_output, num_tokens)

    def changed(self, device: Device, now: float) -> None:
        """Send reports at multiples of the interval, if there is something to report."""
        address = device.info.address
        if address not in self._reporting:
            self._reporting.add(address)
            interval_s, phase_s = self._config.schedule.report_interval_s, self._phase_s[address]
            number = int((now - phase_s) / interval_s + 1e-6) + 1
            self.at(phase_s + number * interval_s, self._report, device)

    def _add_devices(self) -> None:
        for group in self._config.groups:
            roles = [(False, True)] * group.num_decode + [(True, False)] * group.num_prefill
            config = self._device_config(group)
            for number, (prefills, decodes) in enumerate([*roles, *[(True, True)] * group.num_both]):
                self._add_device(
                    group,
                    config,
                    f"{group.cards} {number}" if group.cards else "",
                    prefills=prefills,
                    decodes=decodes,
                )

    def _device_config(self, group: DeviceGroup) -> DeviceConfig:
        config = self._config
        return DeviceConfig(
            step=group.step,
            link=group.link,
            num_layers=config.num_layers,
            message_s=config.message_s,
            steps=learned(
                group.step,
                config.max_batch_tokens,
                config.max_num_seqs,
                knows_experts=config.knows_experts,
            ),
            lookahead=config.lookahead,
            mixed_batch_tokens=config.mixed_batch_tokens,
            host_bytes_per_s=config.host_bytes_per_s if config.host_blocks else 0.0,
        )

    def _add_device(
        self, group: DeviceGroup, device: DeviceConfig, card: str, *, prefills: bool, decodes: bool
    ) -> None:
        config, number = self._config, len(self.devices) + 1
        host_blocks = 0 if config.state_blocks else config.host_blocks
        address = f"{'both' if prefills and decodes else 'prefill' if prefills else 'decode'}-{number}"
        info = Register(
            address=address,
            incarnation=address,
            prefills=prefills,
            decodes=decodes,
            host=HOST,
            block_size=config.block_tokens,
            num_blocks=group.num_blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_num_seqs=config.max_num_seqs,
            kv_token_bytes=config.kv_token_bytes,
            state_blocks=config.state_blocks,
            sends=True,
            answers=True,
            reports_links=config.reports_links,
            overcommit_blocks=overcommit_blocks(group.num_blocks, host_blocks, config.tuning),
            card=card,
        )
        policy: SchedulerPolicy[SimulatedSequence] = (
            HeadroomPolicy(config.tuning) if decodes else DeadlinePolicy(config.tuning)
        )
        self._phase_s[address] = (number - 1) * STAGGER_S - (config.num_instances * STAGGER_S + SETTLE_S)
        make_device = SendingDevice if config.reports_links else Device
        if isinstance(device.step, SharedCost):
            shared = self._cards.setdefault(card, Card())
            device = replace(device, step=shared.step(device.step), shares_card=True)
            shared.put(made := make_device(info, device, policy, self))
        else:
            made = make_device(info, device, policy, self)
        self.devices[address] = made
        if decodes:
            self._most_tokens = max(self._most_tokens, info.capacity_tokens)
        self._feed(0.0, info)
        self.changed(self.devices[address], 0.0)

    def _report(self, now: float, device: Device) -> None:
        self._reporting.discard(device.info.address)
        if device.is_busy:
            self.changed(device, now)
        if (report := device.report(now)) is not None:
            self.at(now + self._config.message_s, self._feed, report)

    def _arrive(self, job: SimulatedRequest) -> None:
        self.now = now = max(self.now, job.request.arrival_at)
        self._jobs[job.request.id] = job
        request = job.request
        place = PlaceRequest(
            request_id=request.id,
            attempt=0,
            num_tokens=job.num_prompt,
            max_new_tokens=max(
                job.max_tokens, min(self._config.asked_tokens, self._most_tokens - job.num_prompt)
            ),
            block_hashes=job.hashes,
            slo=request.slo,
            tenant=request.tenant,
            weight=request.weight,
        )
        self.at(now + self._config.message_s, self._feed, RequestArrived(_FRONTEND, place))

    def _go_on(self, job: SimulatedRequest, seen_at: float) -> None:
        """Let its session's next turn come."""
        if job.then is not None:
            self.at(seen_at + job.after_s, self._follow, job.then)

    def _follow(self, now: float, job: SimulatedRequest) -> None:
        job.request = replace(job.request, arrival_at=now)
        self._arrive(job)

    def _feed(self, now: float, event: Event) -> None:
        for action in self._scheduler.on(event, now):
            match action.message:
                case PlaceReply(request_id, _, route, slo):
                    job = self._jobs.pop(request_id)
                    if slo is not None and slo is not job.request.slo:
                        job.request = replace(job.request, slo=slo)
                    submitted_at = now + 2 * self._config.message_s
                    self.at(submitted_at, self.devices[route.decode].submit, job, route.prefill)
                case Rejected(request_id, _, reason):
                    job = self._jobs.pop(request_id)
                    job.rejected = reason
                    self._go_on(job, now + self._config.message_s)
                case _:
                    pass  # nothing is lost here, and nobody keeps replicas
        if num_queued := self._scheduler.num_queued:
            self._num_looked_at += min(num_queued, _MOST_LOOKED_AT)
            if not self._ticking:
                self._ticking = True
                self.at(now + _TICK_S, self._tick)

    def _tick(self, now: float) -> None:
        self._ticking = False
        self._feed(now, Tick())

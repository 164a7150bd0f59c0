"""Whatever happens in whatever order: no reservation beyond headroom, one answer for each request, and books that close."""

from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_events import Event, PeerLost, PrefillNeeded, RequestArrived, Send, Tick
from core.config.cluster_config import ScheduleConfig
from core.messages import Finished, NeedPrefill, PlaceReply, PrefillAssigned, Rejected
from tests.cluster.scheduler.routing_world import ask, instance, report

_NAMES = ("d0", "d1", "p0", "m0")
_ROLES = {"d0": "d", "d1": "d", "p0": "p", "m0": "pd"}

_steps = st.one_of(
    st.tuples(
        st.just("ask"), st.integers(1, 900), st.integers(0, 400), st.integers(-1, 2), st.integers(0, 2)
    ),
    st.tuples(st.just("finish"), st.integers(0, 100)),
    st.tuples(st.just("report"), st.sampled_from(_NAMES), st.integers(0, 60), st.integers(0, 3000)),
    st.tuples(st.just("register"), st.sampled_from(_NAMES), st.integers(1, 3)),
    st.tuples(st.just("lose"), st.sampled_from((*_NAMES, "f0", "f1"))),
    st.tuples(st.just("need"), st.integers(0, 100)),
    st.tuples(st.just("tick"), st.floats(0, 8)),
)


@dataclass(kw_only=True)
class Run:
    """A scheduler, and what its clients have been told."""

    log: list[str] = field(default_factory=list)
    now: float = 0.0
    asked: dict[str, RequestArrived] = field(default_factory=dict)
    answered: dict[str, Send] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        config = ScheduleConfig(max_queued_requests=5, max_queue_wait_s=6)
        self.scheduler = GlobalScheduler(config, log=self.log.append)

    def on(self, event: Event) -> None:
        for action in self.scheduler.on(event, self.now):
            if isinstance(action.message, PrefillAssigned):
                continue
            name = action.message.request_id
            assert name not in self.answered, f"{name} was answered twice"
            assert name not in self.done
            self.answered[name] = action
            assert action.to == self.asked[name].frontend
            if isinstance(action.message, PlaceReply):
                self._check_headroom(action.message)
        self._check_books()

    def _check_headroom(self, placed: PlaceReply) -> None:
        members = {m.address: m for m in self.scheduler.members}
        decode, place = members[placed.route.decode], self.asked[placed.request_id].place
        found = decode.above(place.slo.priority)
        assert found.free_blocks >= 0
        assert found.num_seqs <= decode.info.max_num_seqs
        assert decode.info.decodes
        assert place.num_tokens + place.max_new_tokens <= decode.info.num_blocks * 16
        assert not placed.route.prefill or members[placed.route.prefill].info.prefills

    def _check_books(self) -> None:
        open_ = self.asked.keys() - self.answered.keys() - self.done
        assert self.scheduler.num_queued == len(open_)
        for member in self.scheduler.members:
            assert member.num_reservations <= self.scheduler.num_placed

    def step(self, step: tuple[object, ...], number: int) -> None:
        match step:
            case ("ask", int(num_tokens), int(max_new), int(priority), int(prefix)):
                name = f"r{number}"
                event = ask(
                    name, num_tokens, max_new, priority=priority, prefix=prefix + 1, frontend=f"f{number % 2}"
                )
                self.asked[name] = event
                self.on(event)
            case ("finish", int(which)) if self.asked:
                name = list(self.asked)[which % len(self.asked)]
                self.done.add(name)
                self.on(Finished(name, 0))
            case ("report", str(name), int(used), int(waiting)):
                hashes = ask("x", 320, prefix=1).place.block_hashes
                self.on(
                    report(name, free_blocks=60 - used, waiting_tokens=waiting, cache_added=hashes[:used])
                )
            case ("register", str(name), int(incarnation)):
                self.on(
                    instance(name, _ROLES[name], num_blocks=60, max_num_seqs=4, incarnation=str(incarnation))
                )
            case ("lose", str(name)):
                self.done |= {n for n, a in self.asked.items() if a.frontend == name}
                self.on(PeerLost(name))
            case ("need", int(which)) if self.asked:
                name = list(self.asked)[which % len(self.asked)]
                self.on(
                    PrefillNeeded(
                        "d0", NeedPrefill(request_id=name, attempt=0, epoch=1, num_tokens=100, lost="p0")
                    )
                )
            case ("tick", float(delay_s)):
                self.now += delay_s
                self.on(Tick())
            case _:
                pass

    def close(self) -> None:
        """Everyone leaves: nothing may remain."""
        for name in self.asked:
            self.done.add(name)
            self.on(Finished(name, 0))
        assert self.scheduler.num_queued == self.scheduler.num_placed == 0
        assert [m.num_reservations for m in self.scheduler.members if m.num_reservations] == []
        assert all(m.queued_tokens <= 3000 for m in self.scheduler.members)


def _run(steps: list[tuple[object, ...]]) -> Run:
    run = Run()
    for name in _NAMES[:3]:
        run.step(("register", name, 1), 0)
    for number, step in enumerate(steps):
        run.step(step, number)
    run.close()
    return run


@given(st.lists(_steps, max_size=60))
@settings(max_examples=150, deadline=None)
def test_one_answer_each_never_beyond_headroom_and_closed_books(steps: list[tuple[object, ...]]) -> None:
    _run(steps)


@given(st.lists(_steps, max_size=40))
@settings(max_examples=40, deadline=None)
def test_the_same_events_give_the_same_log(steps: list[tuple[object, ...]]) -> None:
    assert _run(steps).log == _run(steps).log


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(-1, 2)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
@example([(1, 1), (1, 1), (7, 0), (199, 1), (679, 1)])
def test_everyone_is_served_when_everyone_finishes(asks: list[tuple[int, int]]) -> None:
    """No starvation: with requests that end, every waiter gets its place, large or small."""
    run = Run()
    run.scheduler = GlobalScheduler(ScheduleConfig(max_queue_wait_s=1000), log=run.log.append)
    run.step(("register", "d0", 1), 0)
    for number, (num_tokens, priority) in enumerate(asks):
        run.step(("ask", num_tokens, 10, priority, 0), number)
    for _ in range(2 * len(asks)):
        for name, action in list(run.answered.items()):
            assert not isinstance(action.message, Rejected)
            if name not in run.done:
                run.done.add(name)
                run.now += 1.0
                run.on(Finished(name, 0))
    assert run.answered.keys() == run.asked.keys()

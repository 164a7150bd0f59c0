"""The global scheduler: its promises under random histories, and what it decides in plain situations."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.routing import BYPASS_S, NOBODY_GRACE_S, GlobalScheduler, Heard, PeerLost, Send, Tick
from core.config import ScheduleConfig
from core.kv import block_hashes
from core.messages import (
    Finished,
    LoadReport,
    NeedPrefill,
    Place,
    Placed,
    PrefillAssigned,
    Register,
    Rejected,
)
from core.types import Slo

BLOCK = 16


def register(address: str, *, prefills: bool = False, blocks: int = 100, seqs: int = 8) -> Register:
    return Register(address, address, prefills, not prefills, "host", BLOCK, blocks, 512, seqs)


def report(
    address: str,
    free: int = 100,
    *,
    waiting: int = 0,
    running: int = 0,
    added: tuple[int, ...] = (),
    rate: float = 4000.0,
):
    return LoadReport(address, 1, free, waiting, 0, running, rate, 0.01, added)


def place(
    name: str,
    tokens: int = 200,
    *,
    new: int = 64,
    prompt: int = 0,
    attempt: int = 0,
    exclude: tuple[str, ...] = (),
    priority: int = 0,
):
    ids = [prompt * 1000 + i for i in range(tokens)]
    return Place(name, attempt, tokens, new, block_hashes(ids, BLOCK), Slo(priority=priority), exclude)


class World:
    def __init__(self, *infos: Register, **config: float) -> None:
        self.log: list[str] = []
        self.scheduler = GlobalScheduler(ScheduleConfig(**config), log=self.log.append)  # type: ignore[arg-type]
        self.now = 0.0
        for info in infos:
            self.hear(info.address, info)

    def hear(self, sender: str, message: object) -> list[Send]:
        return self.scheduler.on(Heard(sender, message), self.now)  # type: ignore[arg-type]

    def placed(self, out: list[Send]) -> dict[str, Placed]:
        return {send.message.request_id: send.message for send in out if isinstance(send.message, Placed)}


def test_it_disaggregates_and_stays_local_when_little_is_uncached() -> None:
    world = World(register("d"), register("p", prefills=True))
    route = world.placed(world.hear("f", place("a")))["a"].route
    assert (route.decode, route.prefill) == ("d", "p")
    hashes = place("a").block_hashes
    world.hear("d", report("d", added=hashes))
    assert world.placed(world.hear("f", place("b")))["b"].route.prefill == ""
    assert world.placed(world.hear("f", place("c", prompt=5, tokens=20)))["c"].route.prefill == ""


def test_without_prefill_instances_everything_is_local() -> None:
    world = World(register("d"))
    assert world.placed(world.hear("f", place("a", tokens=1000)))["a"].route.prefill == ""


def test_a_cached_prefix_attracts_and_does_not_herd() -> None:
    world = World(*(register(f"d{i}", seqs=32) for i in range(4)))
    hashes = place("x", 480).block_hashes
    world.hear("d2", report("d2", added=hashes))
    assert world.placed(world.hear("f", place("first", 480)))["first"].route.decode == "d2"
    routes = [
        world.placed(world.hear("f", place(f"r{i}", 480, new=200)))[f"r{i}"].route.decode for i in range(8)
    ]
    assert len(set(routes)) > 1, "all went to the instance with the prefix"


def test_a_burst_between_two_reports_is_spread() -> None:
    world = World(
        *(register(f"d{i}") for i in range(4)), *(register(f"p{i}", prefills=True) for i in range(4))
    )
    routes = [world.placed(world.hear("f", place(f"r{i}", 300, prompt=i)))[f"r{i}"].route for i in range(8)]
    assert len({route.decode for route in routes}) == 4
    assert {route.prefill for route in routes} >= {"p0", "p1", "p2", "p3"}


def test_it_waits_for_headroom_and_goes_on_when_some_is_free() -> None:
    world = World(register("d", blocks=30))
    assert world.placed(world.hear("f", place("a", 300)))
    assert not world.placed(world.hear("f", place("b", 300, prompt=1)))
    assert world.placed(world.hear("f", Finished("a", 0))).keys() == {"b"}


def test_what_can_never_fit_is_refused_for_good() -> None:
    world = World(register("d", blocks=10))
    (send,) = world.hear("f", place("a", 500))
    assert isinstance(send.message, Rejected)
    assert send.message.retry_after_s == 0


def test_small_requests_pass_a_big_one_for_a_while_only() -> None:
    world = World(register("d", blocks=40))
    world.hear("f", place("running", 300, new=16))
    world.hear("f", place("big", 500, new=16, prompt=1))
    world.now = BYPASS_S / 2
    assert world.placed(world.hear("f", place("small", 20, new=4, prompt=2)))
    world.now = BYPASS_S + 1
    world.scheduler.on(Tick(), world.now)
    assert not world.placed(world.hear("f", place("late", 20, new=4, prompt=3)))
    world.hear("f", Finished("small", 0))
    assert list(world.placed(world.hear("f", Finished("running", 0)))) == ["big", "late"]


def test_a_full_queue_refuses_the_last_with_an_honest_retry_after() -> None:
    world = World(register("d", blocks=25), max_queued_requests=2)
    world.hear("f", place("a", 300))
    world.hear("f", place("b", 300))
    world.hear("f", place("c", 300, priority=1))
    (send,) = world.hear("f", place("d", 300, priority=2))
    assert isinstance(send.message, Rejected)
    assert send.message.request_id == "b", "the last in order of priority"
    assert send.message.retry_after_s >= 1


def test_priority_goes_first_and_a_continued_request_before_its_equals() -> None:
    world = World(register("d", blocks=25))
    world.hear("f", place("a", 300))
    for name, priority, attempt in (("low", -1, 0), ("new", 0, 0), ("continued", 0, 1), ("high", 2, 0)):
        world.hear("f", place(name, 300, priority=priority, attempt=attempt))
    order: list[str] = []
    last, attempt = "a", 0
    for _ in range(4):
        ((last, message),) = world.placed(world.hear("f", Finished(last, attempt))).items()
        attempt = message.attempt
        order.append(last)
    assert order == ["high", "continued", "new", "low"]


def test_nobody_alive_is_waited_for_briefly_then_said() -> None:
    world = World()
    assert world.hear("f", place("a")) == []
    assert world.scheduler.status(1).why_not == "no decode instance is alive"
    (send,) = world.scheduler.on(Tick(), NOBODY_GRACE_S)
    assert isinstance(send.message, Rejected)
    world.hear("f", place("b"))
    assert world.placed(world.hear("d", register("d"))).keys() == {"b"}
    assert world.scheduler.status(2).why_not == ""


def test_a_lost_instance_gets_nothing_and_an_excluded_one_only_if_it_is_alone() -> None:
    world = World(register("d1"), register("d2"))
    world.scheduler.on(PeerLost("d1"), 0.0)
    assert {world.placed(world.hear("f", place(f"r{i}")))[f"r{i}"].route.decode for i in range(3)} == {"d2"}
    world.hear("d1", register("d1"))
    assert world.placed(world.hear("f", place("x", exclude=("d2",))))["x"].route.decode == "d1"
    world.scheduler.on(PeerLost("d1"), 0.0)
    assert world.placed(world.hear("f", place("y", exclude=("d2",))))["y"].route.decode == "d2"


def test_a_lost_prefill_is_replaced_or_nobody_is_named() -> None:
    world = World(register("d"), register("p1", prefills=True), register("p2", prefills=True))
    world.hear("f", place("a"))
    (send,) = world.hear("d", NeedPrefill("a", 0, 0, 200, "p1"))
    assert send == Send("d", PrefillAssigned("a", 0, 0, "p2"))
    world.scheduler.on(PeerLost("p1"), 0.0)
    (send,) = world.hear("d", NeedPrefill("a", 0, 1, 200, "p2"))
    assert send == Send("d", PrefillAssigned("a", 0, 1, ""))


def test_a_lost_frontend_frees_all_it_held() -> None:
    world = World(register("d", blocks=25))
    world.hear("f1", place("a", 300))
    world.hear("f1", place("b", 300))
    world.hear("f2", place("c", 300))
    assert world.placed(world.scheduler.on(PeerLost("f1"), 0.0)).keys() == {"c"}
    world.hear("f2", Finished("c", 0))
    assert world.scheduler.num_placements == world.scheduler.num_queued == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_request_gets_one_answer_and_the_books_close(seed: int) -> None:
    logs = [history(seed) for _ in range(2)]
    assert logs[0] == logs[1], "the same history gives the same decisions"


def history(seed: int) -> list[str]:
    rng = random.Random(seed)
    infos = [
        register(f"d{i}", blocks=rng.choice((40, 100)), seqs=rng.choice((2, 8)))
        for i in range(rng.randint(1, 3))
    ]
    infos += [register(f"p{i}", prefills=True) for i in range(rng.randint(0, 2))]
    world = World(*infos, max_queued_requests=10)
    answers: dict[str, int] = {}
    waiting: set[str] = set()
    running: dict[str, Placed] = {}
    for step in range(120):
        world.now += rng.random() * 0.2
        choice = rng.random()
        if choice < 0.5:
            name = f"r{step}"
            waiting.add(name)
            out = world.hear(
                f"f{rng.randint(0, 1)}",
                place(name, rng.randint(1, 400), prompt=rng.randint(0, 5), priority=rng.randint(-1, 1)),
            )
        elif choice < 0.8 and running:
            name = rng.choice(sorted(running))
            del running[name]
            out = world.hear("f0", Finished(name, 0))
        else:
            address = rng.choice(infos).address
            out = world.hear(address, report(address, free=rng.randint(20, 100), running=rng.randint(0, 3)))
        for send in out:
            message = send.message
            assert isinstance(message, Placed | Rejected)
            answers[message.request_id] = answers.get(message.request_id, 0) + 1
            waiting.discard(message.request_id)
            if isinstance(message, Placed):
                running[message.request_id] = message
        for instance in world.scheduler._fleet.values():
            assert instance.num_seqs <= instance.info.max_num_seqs or instance.num_running > 0
    assert set(answers.values()) <= {1}
    assert len(waiting) == world.scheduler.num_queued
    world.now += 1000
    for name in [*running, *waiting]:
        world.hear("f0", Finished(name, 0))
    assert world.scheduler.num_placements == world.scheduler.num_queued == 0
    assert all(instance.num_promises == 0 for instance in world.scheduler._fleet.values())
    return world.log

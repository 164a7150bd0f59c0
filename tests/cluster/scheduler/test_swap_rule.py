"""Which models are awake: memory is never overdrawn, no two models throw each other out in turns, and each has its turn."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.residency.swap_rule import (
    AGED,
    ComingRequests,
    Contender,
    Swaps,
    WaitingLot,
    swaps,
    takes_over,
)

SECONDS = st.floats(0, 60)
LOTS = st.builds(
    WaitingLot,
    priority=st.integers(-1, 2),
    num=st.integers(1, 20),
    left_s=st.floats(-30, 60, allow_nan=False),
)
STREAMS = st.builds(ComingRequests, priority=st.integers(-1, 2), rate=st.floats(0, 20), target_s=SECONDS)
STATES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"holds": False},
        {"holds": True},
        {"holds": True, "may_sleep": True},
        {"holds": True, "is_leaving": True},
    ]
)


@st.composite
def contenders(draw: st.DrawFn, name: str = "m", state: dict[str, Any] | None = None) -> Contender:
    return Contender(
        name=name,
        lots=tuple(draw(st.lists(LOTS, max_size=3))),
        streams=tuple(draw(st.lists(STREAMS, max_size=2))),
        num_running=draw(st.integers(0, 9)),
        age=draw(st.floats(0, 1.5)),
        wake_s=draw(st.floats(0, 20)),
        drain_s=draw(st.floats(0, 10)),
        **(draw(STATES) if state is None else state),
    )


@st.composite
def groups(draw: st.DrawFn) -> list[Contender]:
    return [draw(contenders(f"m{number}")) for number in range(draw(st.integers(1, 6)))]


def awake(name: str = "awake", **of: Any) -> Contender:
    values: dict[str, Any] = {"holds": True, "may_sleep": True, "wake_s": 2.0, **of}
    return Contender(name=name, **values)


def asleep(name: str = "asleep", **of: Any) -> Contender:
    values: dict[str, Any] = {"holds": False, "wake_s": 2.0, **of}
    return Contender(name=name, **values)


def waits(num: int, left_s: float = 5.0, priority: int = 0) -> tuple[WaitingLot, ...]:
    return (WaitingLot(priority=priority, num=num, left_s=left_s),)


def comes(rate: float, target_s: float = 2.0, priority: int = 0) -> tuple[ComingRequests, ...]:
    return (ComingRequests(priority=priority, rate=rate, target_s=target_s),)


@given(groups(), st.integers(1, 4))
def test_memory_is_never_overdrawn(group: list[Contender], num_awake: int) -> None:
    found = swaps(group, num_awake)
    held = {one.name for one in group if one.holds}
    assert len(held | set(found.wake)) <= max(num_awake, len(held))
    assert not held.intersection(found.wake)
    assert set(found.sleep) <= {one.name for one in group if one.may_sleep}
    for name in found.wake:
        assert next(one for one in group if one.name == name).num_waiting, "nobody asks for it"


@given(groups(), st.integers(1, 4))
def test_no_more_models_fall_asleep_than_others_need_their_memory(
    group: list[Contender], num_awake: int
) -> None:
    found = swaps(group, num_awake)
    wanting = sum(not one.holds and one.num_waiting > 0 for one in group)
    coming = sum(one.is_leaving for one in group)
    over = max(0, sum(one.holds for one in group) - num_awake)
    assert len(found.sleep) + len(found.wake) <= max(0, wanting) + over
    assert len(found.sleep) <= max(0, wanting - coming) + over


@given(contenders(state={"holds": False}), contenders(state={"holds": True, "may_sleep": True}))
def test_no_swap_is_undone_while_demand_stays_as_it_is(one: Contender, other: Contender) -> None:
    if takes_over(one, other):
        assert not takes_over(replace(other, holds=False), replace(one, holds=True, may_sleep=True))


def test_a_model_that_nobody_asks_makes_way_at_once() -> None:
    group = [awake(), asleep(lots=waits(1, left_s=1000.0))]
    assert swaps(group, 1) == Swaps(sleep=("awake",))
    assert swaps(group, 2) == Swaps(wake=("asleep",))


def test_a_model_that_is_asked_more_stays() -> None:
    group = [awake(streams=comes(2.0)), asleep(lots=waits(3))]
    assert swaps(group, 1) == Swaps()
    assert swaps([group[0], asleep(lots=waits(30))], 1) == Swaps(sleep=("awake",))


def test_requests_of_a_higher_priority_decide_first() -> None:
    low = awake(streams=comes(50.0))
    assert swaps([low, asleep(lots=waits(1, priority=1))], 1) == Swaps(sleep=("awake",))


def test_waking_for_requests_that_would_be_late_all_the_same_saves_nothing() -> None:
    busy = awake(streams=comes(0.5))
    assert swaps([busy, asleep(lots=waits(20, left_s=1.0))], 1) == Swaps()
    assert swaps([busy, asleep(lots=waits(20, left_s=2.5))], 1) == Swaps(sleep=("awake",))


def test_what_has_time_lets_others_go_on_until_it_has_none_left() -> None:
    busy = awake(streams=comes(0.5))
    assert swaps([busy, asleep(lots=waits(5, left_s=60.0))], 1) == Swaps()


def test_aged_requests_come_before_any_number_of_others() -> None:
    busy = awake(streams=comes(100.0, priority=2), lots=waits(100, priority=2))
    late = asleep(lots=waits(1, left_s=-9.0), age=AGED)
    assert swaps([busy, late], 1) == Swaps(sleep=("awake",))
    assert not swaps([replace(busy, age=2 * AGED), late], 1).sleep, "it has waited for longer"


def test_a_model_is_told_once_to_make_way_and_its_memory_is_waited_for() -> None:
    group = [awake(may_sleep=False, is_leaving=True), awake("idle"), asleep(lots=waits(9))]
    assert swaps(group, 2) == Swaps()
    assert swaps([*group, asleep("other", lots=waits(9))], 2) == Swaps(sleep=("idle",))


def test_too_many_awake_are_put_to_sleep_the_least_wanted_first() -> None:
    group = [awake("a", streams=comes(1.0)), awake("b"), awake("c", streams=comes(2.0))]
    assert swaps(group, 1) == Swaps(sleep=("b", "a"))


class Play:
    """Models that answer all that waits at once when they are awake, in steps of a second."""

    LEAST_S, WAKE_S, PATIENCE_S = 5, 2, 30

    def __init__(self, num_models: int) -> None:
        self.waiting: list[list[int]] = [[] for _ in range(num_models)]
        self.since = [-1] * num_models
        """When each began to wake up; -1: it sleeps."""
        self.longest_s = self.num_swaps = 0

    def step(self, now: int, arrived: Sequence[int]) -> None:
        for model in arrived:
            self.waiting[model].append(now)
        found = swaps([self._contender(model, now) for model in range(len(self.waiting))], 2)
        for name in found.sleep:
            self.since[int(name)] = -1
            self.num_swaps += 1
        for name in found.wake:
            self.since[int(name)] = now
        assert sum(since >= 0 for since in self.since) <= 2
        for model, since in enumerate(self.since):
            if since >= 0 and now >= since + self.WAKE_S:
                self.waiting[model].clear()
        self.longest_s = max((self.longest_s, *(now - one[0] for one in self.waiting if one)))

    def _contender(self, model: int, now: int) -> Contender:
        arrived, since = self.waiting[model], self.since[model]
        return Contender(
            name=str(model),
            holds=since >= 0,
            may_sleep=since >= 0 and now >= since + self.WAKE_S + self.LEAST_S,
            lots=tuple(WaitingLot(priority=model, num=1, left_s=at + 4.0 - now) for at in arrived),
            streams=(ComingRequests(priority=model, rate=float(model), target_s=4.0),),
            age=(now - arrived[0]) / self.PATIENCE_S if arrived else 0.0,
            wake_s=self.WAKE_S,
        )


@settings(max_examples=25)
@given(st.lists(st.sets(st.integers(0, 4)), min_size=150, max_size=150))
def test_whatever_comes_no_request_waits_for_ever_and_swaps_are_few(steps: list[set[int]]) -> None:
    """Higher models have a higher priority and more demand."""
    play, num_models = Play(5), 5
    for now, arrived in enumerate(steps):
        play.step(now, sorted(arrived))
    turn_s = Play.WAKE_S + Play.LEAST_S + 2
    assert play.longest_s <= AGED * Play.PATIENCE_S + num_models * turn_s
    assert play.num_swaps <= 2 * len(steps) / (Play.WAKE_S + Play.LEAST_S)

"""Sequences that are ahead of their pace sit out while others have their blocks, and come back in time."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from core.scheduler_tuning import DEFAULT_TUNING as TUNING
from core.types import Request, Slo
from engine.planning.sequence import Sequence, State
from engine.planning.step_scheduler import StepScheduler
from tests.engine.planning.returning_world import SIZE, World, check, request

PACE_S, STEP_S = 0.04, 0.02
AHEAD_TOKENS = int(TUNING.pauses_s / (PACE_S - STEP_S)) + 5
"""A sequence with so many tokens is far enough ahead to pause."""


def paced(
    name: str, length: int = 8, max_tokens: int = 120, *, tpot_s: float = PACE_S, priority: int = 0
) -> Request:
    return replace(request(name, length, max_tokens), slo=Slo(tpot_s=tpot_s, priority=priority))


def overcommit_world(num_blocks: int, *requests: Request, **more: object) -> World:
    """`requests` run, and the world's clock has not gone on far."""
    w = World(num_blocks, **{"step_s": STEP_S, "longest_pause_s": 5.0, **more})  # type: ignore[arg-type]
    for one in requests:
        w.scheduler.sequences.add(one)
    w.until(lambda: all(one.key in w.out for one in requests))
    return w


def seq(w: World, one: Request) -> Sequence:
    return scheduler(w).group.table.all[one.key]


def scheduler(w: World) -> StepScheduler:
    assert isinstance(w.scheduler, StepScheduler)
    return w.scheduler


def until_ahead(w: World, one: Request) -> None:
    w.until(lambda: len(w.out[one.key]) >= AHEAD_TOKENS)
    assert not w.scheduler.load().num_preempted


def paused(w: World, *requests: Request) -> list[str]:
    """The names of those of `requests` that have paused and need not be back yet."""
    here = [one for one in requests if one.key in scheduler(w).group.table.all]
    return [one.id for one in here if seq(w, one).rests_until > w.now]


def run_all(w: World, todo: list[Request], every: int = 1) -> None:
    """Let one of `todo` come each so many turns, and compute all."""
    for number in range(20_000):
        if todo and number % every == 0:
            w.scheduler.sequences.add(todo.pop(0))
        if w.tiers.under_way:
            w.tiers.end()
        if not w.turn() and not (w.tiers.under_way or todo):
            return
    raise AssertionError("it never ends")


def most_late_s(w: World, one: Request) -> float:
    times = w.times[one.key]
    return max(at - times[0] - number * one.slo.tpot_s for number, at in enumerate(times))


A, B = paced("a"), paced("b", tpot_s=0.05)
NEW = paced("n", length=60, max_tokens=20)
FULL = 42
"""Blocks for A and B when they are ahead, but not for NEW as well."""


@pytest.mark.parametrize("depth", [1, 2])
def test_a_newcomer_gets_the_blocks_of_what_is_furthest_ahead(depth: int) -> None:
    w = overcommit_world(FULL, A, B, depth=depth)
    until_ahead(w, A)
    w.scheduler.sequences.add(NEW)
    w.until(lambda: NEW.key in w.out)
    assert paused(w, A, B, NEW) == ["b"]
    assert w.scheduler.load().num_preempted == 1
    w.finish()
    assert w.scheduler.load().num_returned == w.scheduler.load().num_preempted
    check(w, A, B, NEW)
    assert max(most_late_s(w, one) for one in (A, B)) <= 0


def test_a_reservation_gets_blocks_too() -> None:
    w = overcommit_world(FULL, A, B)
    until_ahead(w, A)
    assert w.scheduler.reservations.reserve(NEW) is None
    assert w.scheduler.reservations.make_room(NEW, w.now)
    assert paused(w, A, B) == ["b"]
    assert w.scheduler.reservations.reserve(NEW) is not None
    w.scheduler.reservations.compute(NEW.key)
    w.finish()
    check(w, A, B, NEW)


def test_where_overcommit_does_not_suffice_nobody_does() -> None:
    w = overcommit_world(FULL, A, B)
    until_ahead(w, A)
    assert not w.scheduler.reservations.make_room(paced("n", length=SIZE * FULL), w.now)
    assert not w.scheduler.load().num_preempted


def test_a_lower_class_gives_way_before_anybody_pauses() -> None:
    low = paced("l", priority=-1, tpot_s=0.01)
    w = overcommit_world(FULL, A, low)
    until_ahead(w, A)
    assert w.scheduler.reservations.make_room(NEW, w.now)
    assert w.scheduler.load().num_preempted == 1
    assert seq(w, low).state is not State.RUNNING
    assert not paused(w, A, low)


def without_tiers(w: World) -> None:
    scheduler(w).prefixes.read_back = None


def with_states(w: World) -> None:
    scheduler(w).group.ledger.num_state_blocks = 1


def unsaved(w: World) -> None:
    seq(w, A).num_kept -= 2
    seq(w, B).num_kept -= 2


def of_a_prompt(w: World) -> None:
    for one in (A, B):
        seq(w, one).num_computed -= 2


@pytest.mark.parametrize(
    "spoil", [without_tiers, with_states, unsaved, of_a_prompt], ids=lambda spoil: spoil.__name__
)
def test_nobody_pauses_whose_kv_would_not_be_found_again(spoil: Callable[[World], None]) -> None:
    w = overcommit_world(FULL, A, B)
    until_ahead(w, A)
    spoil(w)
    assert not w.scheduler.reservations.make_room(NEW, w.now)
    assert not w.scheduler.load().num_preempted


@pytest.mark.parametrize(
    ("tpot_s", "pause_s", "priority"),
    [(STEP_S, 5.0, 0), (PACE_S, 0.0, 0), (PACE_S, 5.0, -1)],
    ids=["not ahead", "no pause", "to a lower class"],
)
def test_a_newcomer_waits_where_nobody_pauses(tpot_s: float, pause_s: float, priority: int) -> None:
    a, b = paced("a", tpot_s=tpot_s), paced("b", tpot_s=tpot_s)
    new = replace(NEW, slo=replace(NEW.slo, priority=priority))
    w = overcommit_world(FULL, a, b, longest_pause_s=pause_s)
    until_ahead(w, a)
    w.scheduler.sequences.add(new)
    for _ in range(10):
        w.turn()
    assert new.key not in w.out
    assert not w.scheduler.load().num_preempted
    assert w.scheduler.load(w.now).pausable_blocks == 0
    w.finish()
    check(w, a, b, new)


def test_one_pauses_as_soon_as_it_is_ahead_by_a_second_and_not_before() -> None:
    w = overcommit_world(FULL, A, paced("b", tpot_s=STEP_S))
    w.until(lambda: len(w.out[A.key]) == 30)
    w.scheduler.sequences.add(paced("n", length=90, max_tokens=20))
    w.until(lambda: w.scheduler.load().num_preempted)
    assert paused(w, A) == ["a"]
    assert len(w.out[A.key]) * (PACE_S - STEP_S) == pytest.approx(TUNING.pauses_s, abs=2 * PACE_S)


def test_a_growing_sequence_takes_from_what_is_furthest_ahead() -> None:
    late = paced("z", tpot_s=STEP_S)  # the policy's victim would be this one, which came last
    w = overcommit_world(60, A, B, late)
    w.until(lambda: w.scheduler.load().num_preempted)
    assert len(w.out[A.key]) > AHEAD_TOKENS
    assert paused(w, A, B, late) == ["b"]
    w.finish()
    check(w, A, B, late)


def resting(**more: object) -> World:
    """A world in which B has paused for NEW."""
    w = overcommit_world(FULL, A, B, **more)
    until_ahead(w, A)
    w.scheduler.sequences.add(NEW)
    w.until(lambda: NEW.key in w.out)
    assert paused(w, A, B, NEW) == ["b"]
    return w


def test_one_that_rests_stays_away_while_others_have_the_blocks() -> None:
    w = resting()
    for _ in range(5):
        w.turn()
        assert seq(w, B).state is State.WAITING
    assert not w.tiers.asked
    assert w.scheduler.load().num_preempted == 1


def test_one_that_rests_does_not_count_what_lower_tiers_have_as_waiting() -> None:
    w = resting()
    tokens = len(seq(w, B).tokens)
    assert w.scheduler.load().num_waiting_tokens == tokens - (tokens - 1) // SIZE * SIZE <= SIZE
    assert w.scheduler.load().waiting_by_priority == ((0, w.scheduler.load().num_waiting_tokens),)


def test_one_that_rests_comes_back_at_once_where_blocks_are_free() -> None:
    w = resting()
    w.scheduler.sequences.abort(NEW.key)
    w.turn()
    w.turn()
    assert [one.id for one in w.tiers.asked] == ["b"]
    assert seq(w, B).state is State.RETURNING
    assert w.scheduler.load().num_preempted == 1
    w.finish()
    check(w, A, B)


@pytest.mark.parametrize("pause_s", [5.0, 0.3])
def test_one_that_rests_takes_blocks_when_its_token_is_due_or_its_pause_is_over(pause_s: float) -> None:
    a, long = paced("a", max_tokens=160), paced("b", length=100, tpot_s=0.05)
    w = overcommit_world(97, a, long, longest_pause_s=pause_s)
    until_ahead(w, a)
    began = w.now
    other = paced("n", length=160, max_tokens=90)
    w.scheduler.sequences.add(other)
    w.until(lambda: w.tiers.asked)
    assert w.tiers.asked[0].id == "b"
    due_at = w.times[long.key][0] + len(w.out[long.key]) * long.slo.tpot_s
    if pause_s < 1:
        assert w.now - began == pytest.approx(pause_s, abs=0.15)
        assert due_at - w.now > TUNING.returns_s + 0.2
        assert paused(w, a, other) == ["a"], "what is furthest ahead gives way to it"
    else:
        assert 0 < due_at - w.now <= TUNING.returns_s + PACE_S
    assert w.scheduler.load().num_preempted > 1
    w.finish()
    check(w, a, long, other)
    assert max(most_late_s(w, one) for one in (a, long)) <= 0


def test_what_has_been_read_back_goes_on_before_a_newcomer() -> None:
    w = resting()
    w.scheduler.sequences.abort(NEW.key)
    w.until(lambda: w.tiers.under_way)
    w.scheduler.sequences.add(paced("x", length=60, max_tokens=20))
    w.tiers.end()
    w.turn()
    assert w.begun[B.key][1] >= (len(B.prompt) + AHEAD_TOKENS - SIZE) // SIZE * SIZE


def test_one_that_is_aborted_while_it_rests_is_forgotten_at_once() -> None:
    w = resting()
    w.scheduler.sequences.abort(B.key)
    w.scheduler.check_integrity()
    assert B.key not in scheduler(w).group.table.all
    assert w.scheduler.load().num_waiting == w.scheduler.load().num_waiting_tokens == 0
    w.finish()
    check(w, A, NEW)
    assert not w.tiers.asked


def test_one_that_rests_goes_on_at_once_where_nothing_else_runs() -> None:
    """No step would end then, so nothing would let the engine plan another."""
    w = resting()
    for one in (A, NEW):
        w.scheduler.sequences.abort(one.key)
    now = w.now
    w.finish()
    check(w, B)
    assert w.now - now < (len(w.out[B.key]) - AHEAD_TOKENS + 10) * STEP_S


def test_only_blocks_of_what_is_far_ahead_are_counted_on() -> None:
    w = overcommit_world(FULL, A, paced("b", tpot_s=1.0))
    w.until(lambda: len(w.out["b#0"]) > 8)
    table = scheduler(w).group.table
    assert w.scheduler.load(w.now).pausable_blocks == len(table.all["b#0"].block_ids)
    assert TUNING.counts_s > TUNING.pauses_s


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("every", [5, 12])
def test_more_sequences_than_fit_keep_their_pace(depth: int, every: int) -> None:
    """There is room for two thirds of them, and steps are half as long as the pace allows."""
    requests = [paced(name, length=200, max_tokens=150) for name in "abcdefghi"]
    most_blocks = 350 // SIZE + 1
    worlds: list[World] = []
    for pause_s in (5.0, 0.0):
        w = World(6 * most_blocks, depth=depth, step_s=STEP_S, longest_pause_s=pause_s)
        run_all(w, requests[:], every)
        check(w, *requests)
        worlds.append(w)
    pauses, without = worlds
    assert max(most_late_s(pauses, one) for one in requests) <= 0
    assert max(most_late_s(without, one) for one in requests) > 0.5
    assert pauses.now < 0.9 * without.now, "more make progress"
    assert pauses.scheduler.load().num_preempted <= len(requests)


@pytest.mark.parametrize("depth", [1, 2])
def test_batch_classes_neither_starve_nor_thrash(depth: int) -> None:
    """Ten seconds per token are promised, so that all are far ahead for good. Each may pause every few tenths of a second."""
    requests = [paced(name, length=40, max_tokens=120, tpot_s=10.0) for name in "abcdefghijkl"]
    pause_s = 0.5
    w = World(240, depth=depth, step_s=STEP_S, longest_pause_s=pause_s)
    run_all(w, requests[:], every=3)
    check(w, *requests)
    longest_s = max(after - before for times in w.times.values() for before, after in pairwise(times))
    assert longest_s < 2 * pause_s
    assert w.scheduler.load().num_preempted <= len(requests) * (1 + w.now / pause_s) / 2
    assert w.num_computed < 1.1 * sum(len(one.prompt) + one.sampling.max_tokens for one in requests)


def test_several_that_grow_at_once_take_the_blocks_of_one() -> None:
    """With two steps in flight its blocks come free later than they are asked for."""
    requests = [paced(name, length=8, max_tokens=100, tpot_s=PACE_S) for name in "abcdef"]
    w = overcommit_world(110, *requests, depth=2)
    w.until(lambda: w.scheduler.load().num_preempted)
    for _ in range(4):
        w.turn()
    assert w.scheduler.load().num_preempted == 1
    w.finish()
    check(w, *requests)

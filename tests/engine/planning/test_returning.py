"""Preempted sequences whose KV lower tiers have: they compute what lies behind it, and nothing else."""

import pytest

from core.errors import Bug
from core.types import Request
from engine.planning.sequence import State
from engine.planning.step_scheduler import StepScheduler
from tests.engine.planning.returning_world import NUM_BLOCKS, SIZE, World, check, request

A, B = request("a"), request("b")


def preempting(*requests: Request, **world: object) -> World:
    """A world in which the last of the requests is preempted, and waits for room."""
    w = World(**world)  # type: ignore[arg-type]
    for one in requests or (A, B):
        w.scheduler.sequences.add(one)
    w.until(lambda: w.scheduler.load().num_preempted)
    return w


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_preempted_sequence_computes_what_lies_behind_the_last_full_block(depth: int, drafts: bool) -> None:
    w = preempting(depth=depth, drafts=drafts)
    w.until(lambda: w.tiers.under_way)
    known = len(B.prompt) + len(w.out[B.key])
    assert w.tiers.asked[0].tokens == (*B.prompt, *w.out[B.key])
    assert w.scheduler.load().num_waiting == 1
    assert w.scheduler.load().num_waiting_tokens == (known - 1) % SIZE + 1
    assert w.scheduler.load().waiting_by_priority == ((0, w.scheduler.load().num_waiting_tokens),)
    assert not w.scheduler.sequences.stuck_pushes
    w.turn()
    assert len(w.tiers.under_way) == 1, "it is read once"
    assert len(w.begun[B.key]) == 1, "it was computed while its KV is read"
    w.tiers.end()
    w.finish()
    assert w.begun[B.key] == [0, (known - 1) // SIZE * SIZE]
    assert w.scheduler.load().num_returned == 1
    check(w, A, B)


def test_it_is_computed_where_it_is_cached_and_nothing_more_lies_below() -> None:
    w = preempting()
    w.tiers.is_empty = True
    w.finish()
    assert len(w.tiers.asked) == w.scheduler.load().num_preempted == 1
    assert w.scheduler.load().num_returned == 0
    check(w, A, B)


def test_without_tiers_nothing_is_asked() -> None:
    w = World()
    assert isinstance(w.scheduler, StepScheduler)
    w.scheduler.prefixes.read_back = None
    for one in (A, B):
        w.scheduler.sequences.add(one)
    w.finish()
    assert not w.tiers.asked
    assert w.scheduler.load().num_preempted
    check(w, A, B)


def test_one_that_is_aborted_while_it_returns_is_forgotten_at_once() -> None:
    w = preempting()
    w.until(lambda: w.tiers.under_way)
    w.scheduler.sequences.abort(B.key)
    w.scheduler.check_integrity()
    assert isinstance(w.scheduler, StepScheduler)
    assert B.key not in w.scheduler.group.table.all
    assert w.scheduler.load().num_waiting == w.scheduler.load().num_waiting_tokens == 0
    w.scheduler.sequences.abort(B.key)
    w.finish()
    assert w.scheduler.load().num_returned == 0
    check(w, A)
    assert w.scheduler.load().num_available_blocks == NUM_BLOCKS


@pytest.mark.parametrize("depth", [1, 2])
def test_where_reading_fails_it_is_computed_and_not_read_again(depth: int) -> None:
    w = preempting(depth=depth)
    w.until(lambda: w.tiers.under_way)
    w.tiers.end(fails=True)
    # It must wait for room meanwhile.
    other = request("o", length=16)
    assert w.scheduler.reservations.reserve(other) is not None
    for _ in range(3):
        w.turn()
    assert w.scheduler.load().num_waiting == 1
    w.scheduler.reservations.release(other.key)
    w.finish()
    assert len(w.tiers.asked) == w.scheduler.load().num_preempted == 1
    assert w.scheduler.load().num_returned == 0
    check(w, A, B)


def test_each_preemption_is_asked_about_once() -> None:
    requests = [request(name, max_tokens=20) for name in "abcdef"]
    w = World(10, depth=2)
    for one in requests:
        w.scheduler.sequences.add(one)
    w.finish()
    assert 1 < w.scheduler.load().num_returned <= len(w.tiers.asked) == w.scheduler.load().num_preempted
    check(w, *requests)


def test_where_all_fails_each_preemption_is_asked_about_once_too() -> None:
    requests = [request(name, max_tokens=20) for name in "abcdef"]
    w = World(10, depth=2)
    for one in requests:
        w.scheduler.sequences.add(one)
    w.finish(fails=True)
    assert 1 < len(w.tiers.asked) == w.scheduler.load().num_preempted
    assert w.scheduler.load().num_returned == 0
    check(w, *requests)


def test_far_less_is_computed_than_without() -> None:
    requests = [request(name, length=20, max_tokens=20) for name in "abcdef"]
    computed: list[int] = []
    for is_empty in (False, True):
        w = World(22, depth=2)
        w.tiers.is_empty = is_empty
        for one in requests:
            w.scheduler.sequences.add(one)
        w.finish()
        check(w, *requests)
        computed.append(w.num_computed - sum(len(one.prompt) + 19 for one in requests))
    again, without = computed
    assert 0 < again < without / 2


def test_a_prompt_of_which_scores_are_wanted_is_computed_again() -> None:
    scored = request("b", length=20, max_tokens=8, num_prompt_logprobs=0)
    w = preempting(request("a", length=8, max_tokens=20), scored, num_blocks=9, max_batch_tokens=2)
    assert not w.out.get(scored.key), "it has been preempted before its first token"
    w.finish()
    assert not w.tiers.asked
    check(w, scored)


def test_once_scores_are_known_it_returns_like_others() -> None:
    scored = request("b", num_prompt_logprobs=0)
    w = preempting(A, scored)
    w.finish()
    assert w.scheduler.load().num_returned == 1
    check(w, A, scored)


def test_room_is_made_among_lower_classes_for_one_that_returns() -> None:
    high, higher = request("h", priority=1), request("i", priority=1)
    w = preempting(high, higher)
    low = request("l", length=18, max_tokens=9)
    w.scheduler.sequences.abort(high.key)
    while w.flight:
        w.turn()
    assert w.scheduler.reservations.reserve(low) is not None
    w.scheduler.reservations.compute(low.key)
    w.turn()  # it is in a step of this turn, and has its blocks until that has ended
    assert w.scheduler.load().num_preempted == 2
    w.turn()
    assert [one.id for one in w.tiers.asked] == [higher.id]
    w.finish()
    assert w.begun[higher.key][1] > 0
    check(w, higher, low)


def test_one_that_returns_keeps_its_slot() -> None:
    w = preempting(max_num_seqs=2)
    w.until(lambda: w.tiers.under_way)
    others = [request(name, length=2, max_tokens=2) for name in "xyz"]
    for one in others:
        w.scheduler.sequences.add(one)
    w.turn()
    assert w.scheduler.load().num_running <= 1
    w.finish()
    check(w, A, B, *others)


def test_a_step_that_is_taken_back_does_not_disturb_what_is_read() -> None:
    w = preempting(depth=2)
    w.until(lambda: w.tiers.under_way)
    other = request("x", length=4, max_tokens=6)
    w.scheduler.sequences.add(other)
    plan = w.scheduler.plan(0.0)
    assert plan is not None
    assert B.key not in {work.key for work in plan.work}
    w.scheduler.take_back()
    w.flight.clear()
    w.scheduler.check_integrity()
    w.finish()
    assert w.scheduler.load().num_returned == 1
    check(w, A, B, other)


def test_with_groups_it_returns_where_it_was() -> None:
    w = World(2 * NUM_BLOCKS, num_groups=2, depth=2)
    # The last two are in the second group, which computes while the first is idle and has nothing cached of either.
    requests = [request("x", length=12, max_tokens=1), request("a", max_tokens=24), B]
    for one in requests:
        w.scheduler.sequences.add(one)
    groups: dict[str, set[int]] = {}
    for _ in range(500):
        if w.tiers.under_way:
            restore, _ = w.tiers.under_way[0]
            key = next(one.key for one in requests if restore.tokens[: len(one.prompt)] == one.prompt)
            assert groups[key] == {restore.fresh[0] // NUM_BLOCKS}
            w.tiers.end()
        if not w.turn() and not w.tiers.under_way:
            break
        for plan, _ in w.flight:
            for work in plan.work:
                groups.setdefault(work.key, set()).update(block // NUM_BLOCKS for block in work.block_ids)
    assert w.scheduler.load().num_returned == w.scheduler.load().num_preempted == 1
    assert groups == {"a#0": {1}, "b#0": {1}}
    check(w, *requests)


def test_a_sequence_that_returns_and_is_not_listed_so_is_a_bug() -> None:
    w = preempting()
    w.until(lambda: w.tiers.under_way)
    assert isinstance(w.scheduler, StepScheduler)
    w.scheduler.group.table.all[B.key].state = State.WAITING
    with pytest.raises(Bug, match="WAITING"):
        w.scheduler.check_integrity()

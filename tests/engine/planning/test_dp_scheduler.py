"""Which group of ranks serves a sequence, and what is said of all of them together."""

import pytest

from core.config.cluster_config import EngineConfig
from core.errors import RequestError
from core.plan import Sampled, StepPlan, StepResult
from core.types import Request, SamplingParams
from engine.planning.dp_scheduler import DpScheduler
from tests.engine.fifo_policy import FifoPolicy

BLOCKS, SIZE = 16, 4


def planner() -> DpScheduler:
    config = EngineConfig(block_size=SIZE, max_batch_tokens=64)
    return DpScheduler(config, 2 * BLOCKS, 1000, FifoPolicy(), 2)


def request(name: str, start: int, length: int, max_tokens: int = 1) -> Request:
    return Request(
        id=name,
        prompt=tuple(range(start, start + length)),
        sampling=SamplingParams(max_tokens=max_tokens),
        reply_to="f",
    )


def run(scheduler: DpScheduler, plan: StepPlan | None) -> StepPlan:
    assert plan is not None
    sampled = tuple(Sampled(w.key, 7) for w in plan.work if w.samples)
    scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled), 0.0)
    return plan


def groups(plan: StepPlan) -> dict[str, int]:
    return {work.key: work.block_ids[0] // BLOCKS for work in plan.work}


def test_prompts_go_where_there_is_least_to_do_and_are_computed_in_one_step() -> None:
    scheduler = planner()
    for name, length in (("a", 20), ("b", 8), ("c", 8)):
        scheduler.sequences.add(request(name, 100 * ord(name), length))
    plan = run(scheduler, scheduler.plan(0.0))
    assert groups(plan) == {"a#0": 0, "b#0": 1, "c#0": 1}


def test_a_prompt_goes_where_its_prefix_is_unless_there_is_too_much_to_do() -> None:
    scheduler = planner()
    scheduler.sequences.add(request("first", 0, 24))
    home = groups(run(scheduler, scheduler.plan(0.0)))["first#0"]
    scheduler.sequences.add(request("again", 0, 25))
    assert groups(run(scheduler, scheduler.plan(0.0))) == {"again#0": home}
    scheduler.sequences.add(request("long", 500, 30))
    scheduler.sequences.add(request("more", 600, 30))
    busy = groups(run(scheduler, scheduler.plan(0.0)))
    assert sorted(busy.values()) == [0, 1]


def test_a_reservation_is_made_where_there_is_room() -> None:
    scheduler = planner()
    names = ("a", "b", "c")
    found = [scheduler.reservations.reserve(request(name, 100 * ord(name), 40, 8)) for name in names]
    assert found[0] is not None
    assert found[1] is not None
    assert found[2] is None
    assert {one.block_ids[0] // BLOCKS for one in found if one is not None} == {0, 1}
    scheduler.reservations.release("a#0")
    third = scheduler.reservations.reserve(request("c", 900, 40, 8))
    assert third is not None
    assert third.block_ids[0] // BLOCKS == found[0].block_ids[0] // BLOCKS
    scheduler.check_integrity()


def test_a_block_that_two_groups_keep_is_reported_once() -> None:
    scheduler = planner()
    for name in ("x", "y"):
        scheduler.sequences.add(request(name, 0, 8))
    plan = run(scheduler, scheduler.plan(0.0))
    assert sorted(groups(plan).values()) == [0, 1]
    added, removed = scheduler.prefixes.drain_cache_events()
    assert (len(added), removed) == (2, ())
    scheduler.prefixes.replay_cache_events()
    assert sorted(scheduler.prefixes.drain_cache_events()[0]) == sorted(added)
    assert scheduler.prefixes.drain_cache_events() == ((), ())


def test_a_prefix_from_below_goes_behind_what_is_cached_or_where_the_least_is_to_do() -> None:
    scheduler = planner()
    scheduler.sequences.add(request("first", 0, 8))
    home = groups(run(scheduler, scheduler.plan(0.0)))["first#0"]
    behind = scheduler.prefixes.begin_restore(request("more", 0, 24), 4)
    fresh = [scheduler.prefixes.begin_restore(request(name, 100 * ord(name), 24), 5) for name in ("a", "b")]
    assert behind is not None
    assert len(behind.prefix) == 2
    found = [restore.blocks[0] // BLOCKS for restore in fresh if restore is not None]
    assert (behind.blocks[0] // BLOCKS, found[0]) == (home, 1 - home)
    assert len(found) == 2
    for restore in (behind, *filter(None, fresh)):
        scheduler.prefixes.publish_restore(restore, len(restore.blocks))
        scheduler.prefixes.end_restore(restore)
    scheduler.sequences.add(request("a", 100 * ord("a"), 24))
    assert groups(run(scheduler, scheduler.plan(0.0))) == {"a#0": 1 - home}
    scheduler.check_integrity()


def test_what_fits_all_groups_together_and_none_alone_is_refused() -> None:
    with pytest.raises(RequestError, match=f"exceed this instance's KV cache of {BLOCKS * SIZE}"):
        planner().sequences.add(request("long", 0, BLOCKS * SIZE, 1))
    planner().sequences.add(request("longest", 0, BLOCKS * SIZE - 1, 1))

"""Which group of ranks serves a sequence, and what is said of all of them together."""

from core.config import EngineConfig
from core.plan import Sampled, StepPlan, StepResult
from core.types import Request, SamplingParams
from engine.dp_scheduler import DpScheduler
from engine.policy import FifoPolicy

BLOCKS, SIZE = 16, 4


def planner() -> DpScheduler:
    config = EngineConfig(block_size=SIZE, max_batch_tokens=64)
    return DpScheduler(config, 2 * BLOCKS, 1000, FifoPolicy(), 2)


def request(name: str, start: int, length: int, max_tokens: int = 1) -> Request:
    return Request(name, tuple(range(start, start + length)), SamplingParams(max_tokens=max_tokens), "f")


def run(scheduler: DpScheduler, plan: StepPlan | None) -> StepPlan:
    assert plan is not None
    scheduler.commit(plan, StepResult(plan.step, tuple(Sampled(w.key, 7) for w in plan.work if w.samples)))
    return plan


def groups(plan: StepPlan) -> dict[str, int]:
    return {work.key: work.block_ids[0] // BLOCKS for work in plan.work}


def test_prompts_go_where_there_is_least_to_do_and_are_computed_in_one_step() -> None:
    scheduler = planner()
    for name, length in (("a", 20), ("b", 8), ("c", 8)):
        scheduler.add(request(name, 100 * ord(name), length))
    plan = run(scheduler, scheduler.plan(0.0))
    assert groups(plan) == {"a#0": 0, "b#0": 1, "c#0": 1}


def test_a_prompt_goes_where_its_prefix_is_unless_there_is_too_much_to_do() -> None:
    scheduler = planner()
    scheduler.add(request("first", 0, 24))
    home = groups(run(scheduler, scheduler.plan(0.0)))["first#0"]
    scheduler.add(request("again", 0, 25))
    assert groups(run(scheduler, scheduler.plan(0.0))) == {"again#0": home}
    scheduler.add(request("long", 500, 30))
    scheduler.add(request("more", 600, 30))
    busy = groups(run(scheduler, scheduler.plan(0.0)))
    assert sorted(busy.values()) == [0, 1]


def test_a_reservation_is_made_where_there_is_room() -> None:
    scheduler = planner()
    names = ("a", "b", "c")
    found = [scheduler.reserve(request(name, 100 * ord(name), 40, 8)) for name in names]
    assert found[0] is not None
    assert found[1] is not None
    assert found[2] is None
    assert {one.block_ids[0] // BLOCKS for one in found if one is not None} == {0, 1}
    scheduler.release("a#0")
    third = scheduler.reserve(request("c", 900, 40, 8))
    assert third is not None
    assert third.block_ids[0] // BLOCKS == found[0].block_ids[0] // BLOCKS
    scheduler.check_integrity()


def test_a_block_that_two_groups_keep_is_reported_once() -> None:
    scheduler = planner()
    for name in ("x", "y"):
        scheduler.add(request(name, 0, 8))
    plan = run(scheduler, scheduler.plan(0.0))
    assert sorted(groups(plan).values()) == [0, 1]
    added, removed = scheduler.drain_cache_events()
    assert (len(added), removed) == (2, ())
    scheduler.replay_cache_events()
    assert sorted(scheduler.drain_cache_events()[0]) == sorted(added)
    assert scheduler.drain_cache_events() == ((), ())

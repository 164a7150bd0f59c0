"""Sequences that a step could not compute: they end, nothing of what it wrote is kept, and all others go on."""

import pytest

from core.config.cluster_config import EngineConfig
from core.messages import Grant
from core.plan import FailedSeq, Sampled, StepPlan, StepResult
from core.types import Request, SamplingParams
from engine.planning.step_scheduler import StepScheduler
from tests.engine.fifo_policy import FifoPolicy

BLOCK_SIZE = 2


def asked(name: str, first: int, max_tokens: int = 3) -> Request:
    prompt = tuple(range(first, first + 12))
    return Request(id=name, prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens), reply_to="f")


def run(plan: StepPlan, *failed: str) -> StepResult:
    sampled = tuple(Sampled(work.key, 90) for work in plan.work if work.samples)
    return StepResult(step=plan.step, sampled=sampled, failed=tuple(FailedSeq(key, "why") for key in failed))


def planner() -> StepScheduler:
    return StepScheduler(EngineConfig(block_size=BLOCK_SIZE, max_batch_tokens=8), 60, 1000, FifoPolicy())


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_failed_step_wrote_is_not_cached_and_others_go_on(depth: int) -> None:
    engine, bad, good = planner(), asked("bad", 10), asked("good", 30)
    engine.sequences.add(bad)
    engine.sequences.add(good)
    flight: list[StepPlan] = []
    ended: list[str] = []
    while len(flight) < depth and (plan := engine.plan(0.0)):
        flight.append(plan)
    number = 0
    while flight:
        plan, number = flight.pop(0), number + 1
        fails = ["bad#0"] if number == 2 and any(work.key == "bad#0" for work in plan.work) else []
        ended += [one.key for one in engine.commit(plan, run(plan, *fails), 0.0) if one.finish]
        engine.check_integrity()
        while len(flight) < depth and (plan := engine.plan(0.0)):
            flight.append(plan)
    assert ended == ["good#0"]
    assert "bad#0" not in engine.group.table.all
    assert engine.load().num_used_blocks == 0
    assert engine.prefixes.cached_prefix(bad).num_kept == 8 // BLOCK_SIZE, "what the first step has computed"
    assert engine.prefixes.cached_prefix(good).num_kept == 11 // BLOCK_SIZE, "but for its last token"


def test_a_pushed_one_keeps_its_blocks_until_they_are_released() -> None:
    engine, bad = planner(), asked("bad", 10)
    grant = Grant(
        id="g",
        key=bad.key,
        epoch=0,
        holder="h",
        incarnation="i",
        regions=(),
        block_ids=tuple(range(9)),
        first_token=0,
        num_tokens=12,
        ttl_s=1.0,
    )
    engine.sequences.add(bad, grant)
    plan = engine.plan(0.0)
    assert plan is not None
    assert engine.commit(plan, run(plan, "bad#0"), 0.0) == []
    assert engine.load().num_used_blocks > 0
    assert engine.plan(0.0) is None
    engine.reservations.release("bad#0")
    engine.check_integrity()
    assert engine.load().num_used_blocks == 0
    assert engine.prefixes.cached_prefix(bad).num_kept == 0

"""Prompts that are too late let others pass, for a while; by the scheduler's own plans."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config.cluster_config import EngineConfig
from core.cost.steps import StepModel, StepModels
from core.pacing.lateness import is_late
from core.plan import Sampled, StepResult
from core.ports import SchedulerPolicy
from core.scheduler_tuning import DEFAULT_TUNING as TUNING
from core.types import Request, SamplingParams, Slo
from decode.headroom_policy import HeadroomPolicy
from engine.planning.sequence import Sequence
from engine.planning.step_scheduler import StepScheduler
from prefill.deadline_policy import DeadlinePolicy
from tests.engine.fifo_policy import FifoPolicy

STEPS = StepModels(
    prompt=StepModel(fixed_s=0.008, token_s=1e-4, context_s=0.0, seq_s=0.0, error=0.0, num_steps=100)
)
"""1,000 tokens of a prompt take 100 ms."""
POLICIES: list[SchedulerPolicy[Sequence]] = [HeadroomPolicy(), DeadlinePolicy()]


def _request(
    name: str, num_prompt: int, arrival_at: float, ttft_s: float = 1.0, priority: int = 0
) -> Request:
    prompt = tuple(sum(map(ord, name)) + i for i in range(num_prompt))
    slo = Slo(name=name, ttft_s=ttft_s, tpot_s=1.0, priority=priority)
    return Request(
        id=name,
        prompt=prompt,
        sampling=SamplingParams(max_tokens=5),
        reply_to="f",
        slo=slo,
        arrival_at=arrival_at,
    )


class Engine:
    def __init__(self, policy: SchedulerPolicy[Sequence], num_slots: int = 64) -> None:
        config = EngineConfig(max_batch_tokens=1000, max_num_seqs=num_slots)
        self.scheduler = StepScheduler(config, 4000, 50_000, policy)

    def step(self, now: float) -> dict[str, int]:
        """Tokens computed, by request, in the order of the plan."""
        plan = self.scheduler.plan(now, STEPS)
        assert plan is not None
        sampled = tuple(Sampled(work.key, 7) for work in plan.work if work.samples)
        self.scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled), now)
        return {work.key.split("#")[0]: work.count for work in plan.work}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_late_prompt_that_waits_lets_others_pass(policy: SchedulerPolicy[Sequence]) -> None:
    engine = Engine(policy)
    engine.scheduler.sequences.add(_request("late", 900, 0.0))
    engine.scheduler.sequences.add(_request("in time", 600, 1.0))
    assert engine.step(1.5) == {"in time": 600, "late": 400}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_late_prompt_that_was_begun_lets_others_pass(policy: SchedulerPolicy[Sequence]) -> None:
    engine = Engine(policy)
    engine.scheduler.sequences.add(_request("late", 2500, 0.0))
    assert engine.step(0.1) == {"late": 1000}
    engine.scheduler.sequences.add(_request("in time", 700, 1.0))
    assert engine.step(1.2) == {"in time": 700, "late": 300}


@pytest.mark.parametrize(
    ("now", "late"),
    [(0.74, False), (0.76, True), (0.9 + TUNING.yield_s, True), (1.1 + TUNING.yield_s, False)],
)
def test_it_is_late_once_its_own_work_takes_too_long_and_not_for_ever(now: float, late: bool) -> None:
    """2,500 tokens take 250 ms of the second that it has."""
    seq = Sequence(request=_request("one", 2500, 0.0), tokens=list(range(2500)), num_prompt=2500, arrival=0)
    assert is_late(seq, now, STEPS, TUNING) == late
    seq.num_computed = 2499
    assert is_late(seq, now, STEPS, TUNING) == (late and now > 0.9)


def test_after_a_while_it_takes_its_turn_again() -> None:
    engine = Engine(DeadlinePolicy())
    engine.scheduler.sequences.add(_request("late", 900, 0.0))
    engine.scheduler.sequences.add(_request("in time", 600, TUNING.yield_s + 0.9))
    assert engine.step(TUNING.yield_s + 1.1) == {"late": 900, "in time": 100}


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_while_one_that_was_begun_gets_a_share_whatever_comes_of_higher_classes(
    policy: SchedulerPolicy[Sequence],
) -> None:
    """A step of 1,000 tokens takes 0.1 s, and others come as fast as they are computed."""
    engine = Engine(policy)
    engine.scheduler.sequences.add(_request("low", 9000, 0.0, ttft_s=0.5, priority=-1))
    num_computed, num_steps = engine.step(0.0)["low"], 0
    while num_computed < 9000:
        now = 0.1 * num_steps
        other = _request("x" * (num_steps + 1), 1000, now)
        engine.scheduler.sequences.add(replace(other, sampling=SamplingParams(max_tokens=1)))
        num_new = engine.step(now).get("low", 0)
        assert not num_new or now > 0.5 + TUNING.yield_s
        num_computed, num_steps = num_computed + num_new, num_steps + 1
        assert num_steps < 300
    assert 0.1 * num_steps == pytest.approx(0.5 + TUNING.yield_s + 8000 * 1e-4 / TUNING.least_share, abs=0.5)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_lets_no_class_of_lower_priority_pass(policy: SchedulerPolicy[Sequence]) -> None:
    engine = Engine(policy)
    engine.scheduler.sequences.add(_request("batch", 900, 1.0, float("inf"), priority=-1))
    engine.scheduler.sequences.add(_request("late", 600, 0.0))
    assert engine.step(1.5) == {"late": 600, "batch": 400}


def test_a_late_prompt_gets_no_slot_before_others() -> None:
    engine = Engine(DeadlinePolicy(), num_slots=1)
    engine.scheduler.sequences.add(_request("late", 100, 0.0))
    engine.scheduler.sequences.add(_request("in time", 100, 1.0))
    assert engine.step(1.5) == {"in time": 100}


def test_without_targets_what_was_begun_goes_on() -> None:
    engine = Engine(FifoPolicy())
    engine.scheduler.sequences.add(_request("late", 2500, 0.0))
    engine.step(0.1)
    engine.scheduler.sequences.add(_request("in time", 700, 1.0))
    assert engine.step(1.2) == {"late": 1000}


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(0.0, 15.0)), min_size=1, max_size=12))
def test_all_are_computed_whoever_is_late(work: list[tuple[int, float]]) -> None:
    """Every prompt gets its token, and a step is never left empty while one waits."""
    engine = Engine(DeadlinePolicy(), num_slots=4)
    for number, (num_prompt, arrival_at) in enumerate(work):
        engine.scheduler.sequences.add(_request(f"r{number}", num_prompt, arrival_at))
    now = 5.0
    while engine.scheduler.load().num_waiting or engine.scheduler.load().num_running:
        assert engine.step(now)
        now += 0.05
    engine.scheduler.check_integrity()
    assert now < 5.0 + 0.05 * sum(num_prompt // 64 + 6 for num_prompt, _ in work)


def test_the_tokens_of_prompts_that_let_others_pass_are_told_apart() -> None:
    engine = StepScheduler(EngineConfig(block_size=16, max_batch_tokens=512), 1000, 8192, HeadroomPolicy())
    engine.sequences.add(_request("late", 2000, 0.0, ttft_s=0.5))
    engine.sequences.add(_request("timely", 1000, 0.0, ttft_s=5.0))
    assert engine.load(0.0, STEPS).num_late_tokens == 0
    assert engine.load(0.4, STEPS).num_late_tokens == 2000
    engine.plan(0.4, STEPS)
    assert engine.load(0.5, STEPS).num_late_tokens == 2000, "the timely one was computed first"

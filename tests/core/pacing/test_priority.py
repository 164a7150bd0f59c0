"""Classes of several priorities on one instance, by the step scheduler's own plans."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config.cluster_config import EngineConfig
from core.cost.steps import StepModel, StepModels
from core.plan import Sampled, StepPlan, StepResult
from core.scheduler_tuning import DEFAULT_TUNING as TUNING
from core.types import Request, SamplingParams, Slo
from decode.headroom_policy import HeadroomPolicy
from engine.planning.step_scheduler import StepScheduler

DECODE = StepModel(fixed_s=0.010, seq_s=0.001, num_steps=100)
"""A step takes 10 ms, and one more for each sequence."""
STEPS = StepModels(decode=DECODE, prompt=StepModel(fixed_s=0.010, token_s=1e-4, num_steps=100))
HIGH = Slo(name="high", ttft_s=1.0, tpot_s=0.025, priority=1)
LOW = Slo(name="low", ttft_s=100.0, tpot_s=10.0, priority=-1)


def request(name: str, slo: Slo, num_prompt: int = 16, arrival_at: float = 0.0) -> Request:
    prompt = tuple(1 + sum(map(ord, name)) + i for i in range(num_prompt))
    return Request(
        id=name,
        prompt=prompt,
        sampling=SamplingParams(max_tokens=100),
        reply_to="f",
        slo=slo,
        arrival_at=arrival_at,
    )


class Engine:
    def __init__(self, num_slots: int = 64, num_blocks: int = 4000) -> None:
        config = EngineConfig(max_batch_tokens=1000, max_num_seqs=num_slots, block_size=16)
        self.scheduler = StepScheduler(config, num_blocks, 50_000, HeadroomPolicy())
        self.now = 0.0

    def add(self, name: str, slo: Slo, num_prompt: int = 16) -> None:
        self.scheduler.sequences.add(request(name, slo, num_prompt, self.now))

    def plan(self, steps: StepModels = STEPS) -> StepPlan:
        plan = self.scheduler.plan(self.now, steps)
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, took_s: float = 0.02) -> list[str]:
        """Names in the order of the plan."""
        self.now += took_s
        sampled = tuple(Sampled(work.key, 7) for work in plan.work if work.samples)
        self.scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled), self.now)
        self.scheduler.check_integrity()
        return [work.key.split("#")[0] for work in plan.work]

    def step(self, steps: StepModels = STEPS, took_s: float = 0.02) -> list[str]:
        return self.commit(self.plan(steps), took_s)


def decoding(num_low: int, **size: int) -> Engine:
    engine = Engine(**size)
    for number in range(num_low):
        engine.add(f"low{number}", LOW)
    engine.step()
    return engine


def test_lower_classes_decode_beside_a_higher_one_as_far_as_its_target_allows() -> None:
    """0.8 x 25 ms are ten sequences' step."""
    engine = decoding(20)
    engine.add("high", HIGH)
    engine.step()
    assert engine.step() == ["high", *(f"low{i}" for i in range(9))]
    assert len(engine.step(replace(STEPS, decode=replace(DECODE, seq_s=0.0)))) == 21


def test_where_the_device_cannot_keep_the_target_lower_classes_take_a_third_of_its_time() -> None:
    slow = replace(STEPS, decode=replace(DECODE, fixed_s=0.1, seq_s=0.01))
    engine = decoding(20)
    engine.add("high", HIGH)
    engine.step(slow)
    assert engine.step(slow) == ["high", *(f"low{i}" for i in range(5))]


@pytest.mark.parametrize(("num_steps", "num_low"), [(1, 2), (4, 6), (6, 9), (20, 9)])
def test_lower_classes_make_a_higher_ones_steps_longer_by_what_it_got_early(
    num_steps: int, num_low: int
) -> None:
    """Eight take 18 ms, and half as long again are 27. Each step leaves them 6.1 ms more than they had."""
    engine = decoding(20)
    for number in range(8):
        engine.add(f"high{number}", HIGH)
    engine.step()
    for _ in range(num_steps):
        engine.step(took_s=0.0189)
    assert sum(name.startswith("low") for name in engine.step()) == num_low


def test_a_sequence_of_a_lower_class_never_stands_still_for_good() -> None:
    """Ten seconds a token are its target; a quarter of that pace is its own."""
    slow = replace(STEPS, decode=replace(DECODE, seq_s=0.1))
    engine = decoding(1)
    engine.add("high", HIGH)
    engine.step(slow)
    began = engine.now
    while "low0" not in engine.step(slow, took_s=1.0):
        pass
    assert engine.now - began == pytest.approx(LOW.tpot_s / TUNING.least_share, abs=2.0)


def test_a_higher_class_takes_a_slot_of_a_lower_one_which_goes_on_later() -> None:
    engine = decoding(2, num_slots=2)
    engine.add("high", HIGH)
    assert sorted(engine.step()) == ["high", "low0"]
    assert engine.scheduler.load().num_preempted == 1
    engine.scheduler.sequences.abort("high#0")
    engine.step()
    assert engine.step() == ["low0", "low1"]


def test_a_higher_class_takes_blocks_of_a_lower_one_for_a_prompt_and_for_a_reservation() -> None:
    for reserve in (False, True):
        engine = Engine(num_blocks=40)
        engine.add("low", LOW, 500)
        engine.step()
        high = request("high", HIGH, 480, engine.now)
        if reserve:
            assert engine.scheduler.reservations.reserve(high) is None
            assert engine.scheduler.reservations.make_room(high, 0.0)
            assert engine.scheduler.reservations.reserve(high) is not None
        else:
            engine.scheduler.sequences.add(high)
            engine.step()
            assert "high" in engine.step()


def test_a_lower_class_takes_nothing_of_a_higher_one() -> None:
    engine = Engine(num_slots=1)
    engine.add("high", HIGH)
    engine.step()
    engine.add("low", LOW)
    assert engine.step() == ["high"]
    assert not engine.scheduler.reservations.make_room(request("other", LOW), 0.0)


def test_nothing_is_taken_where_it_would_not_suffice() -> None:
    engine = Engine(num_blocks=40)
    engine.add("low", LOW, 16)
    engine.add("peer", HIGH, 500)
    engine.step()
    engine.add("high", HIGH, 480)
    assert engine.step() == ["peer", "low"]
    assert engine.scheduler.load().num_preempted == 0


@given(
    st.lists(st.tuples(st.integers(-1, 2), st.integers(1, 200), st.integers(1, 30)), min_size=1, max_size=24),
    st.integers(1, 6),
    st.integers(16, 60),
)
@settings(max_examples=60, deadline=None)
def test_everything_ends_whatever_the_classes(
    asks: list[tuple[int, int, int]], num_slots: int, num_blocks: int
) -> None:
    engine = Engine(num_slots, num_blocks)
    open_ = set[str]()
    for number, (priority, num_prompt, num_output) in enumerate(asks):
        slo = Slo(name=str(priority), ttft_s=1.0, tpot_s=0.02, priority=priority)
        one = request(f"r{number}", slo, num_prompt)
        engine.scheduler.sequences.add(replace(one, sampling=SamplingParams(max_tokens=num_output)))
        open_.add(one.key)
        if number % 3 == 0:
            engine.step()
    for _ in range(3000):
        if not any(key in engine.scheduler.group.table.all for key in open_):
            return
        engine.step()
    raise AssertionError("some never ended")

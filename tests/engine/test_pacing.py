"""Prompts beside decoding sequences: as much as the time per token allows, by the scheduler's own plans."""

import pytest

from core.config import EngineConfig
from core.plan import Sampled, StepPlan, StepResult
from core.steps import StepModel, StepModels
from core.types import Request, SamplingParams, Slo
from decode.policy import HeadroomPolicy
from engine.pacing import EASY_SHARE, GAINFUL, MIN_TOKENS, SHARE, prompt_tokens
from engine.scheduler import StepScheduler

STEPS = StepModels(prompt=StepModel(0.008, 25e-6, 50e-9, 0.0, 0.0, 100))


def _request(name: str, num_prompt: int, tpot_s: float, salt: int) -> Request:
    prompt = tuple(salt + i for i in range(num_prompt))
    return Request(name, prompt, SamplingParams(max_tokens=500), "f", Slo(tpot_s=tpot_s))


class Engine:
    def __init__(self) -> None:
        config = EngineConfig(max_batch_tokens=4096, max_num_seqs=64)
        self.scheduler = StepScheduler(config, 4000, 50_000, HeadroomPolicy())

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(0.0, STEPS)
        assert plan is not None
        sampled = tuple(Sampled(work.key, 7) for work in plan.work if work.samples)
        self.scheduler.commit(plan, StepResult(plan.step, sampled))
        return plan


def _prompt_part(plan: StepPlan) -> int:
    return sum(work.count for work in plan.work if work.count > 1)


def test_a_step_with_prompts_takes_no_longer_than_the_tightest_target() -> None:
    for tpot_s in (0.015, 0.03, 0.045):
        engine = Engine()
        engine.scheduler.add(_request("loose", 100, 1.0, 1_000))
        engine.scheduler.add(_request("tight", 100, tpot_s, 2_000))
        assert _prompt_part(engine.step()) == 200
        engine.scheduler.add(_request("long", 9000, 1.0, 10_000))
        count = _prompt_part(engine.step())
        step_s = STEPS.prompt.step_s(count + 2, 200, 3)
        assert 0.9 * SHARE * tpot_s <= step_s <= tpot_s


def test_a_loose_target_makes_steps_no_longer_than_prompts_gain_by_it() -> None:
    base_s = STEPS.prompt.step_s(20, 10_000, 21)
    for tpot_s, longest_s in ((0.07, base_s + GAINFUL * STEPS.prompt.fixed_s), (0.1, EASY_SHARE * 0.1)):
        count = prompt_tokens(STEPS, 20, 10_000, tpot_s, 4096)
        assert SHARE * tpot_s > base_s + count * STEPS.prompt.token_s
        assert abs(base_s + (count + 0.5) * STEPS.prompt.token_s - longest_s) <= STEPS.prompt.token_s


@pytest.mark.parametrize(("num_prompt", "share"), [(10_000, EASY_SHARE), (45_000, SHARE)])
def test_a_prompt_whose_own_work_takes_most_of_its_time_gets_longer_steps(
    num_prompt: int, share: float
) -> None:
    """Of two seconds; 25 us for each token."""
    engine, tpot_s = Engine(), 0.1
    engine.scheduler.add(_request("a", 100, tpot_s, 1_000))
    engine.step()
    engine.scheduler.add(_request("b", num_prompt, tpot_s, 10_000))
    step_s = [STEPS.prompt.step_s(_prompt_part(engine.step()) + 1, 100, 2) for _ in range(2)][1]
    assert step_s == pytest.approx(share * tpot_s, rel=0.05)


def test_without_decoding_sequences_the_step_is_full() -> None:
    engine = Engine()
    engine.scheduler.add(_request("a", 9000, 0.01, 10_000))
    assert _prompt_part(engine.step()) == 4096


def test_prompts_go_on_where_decoding_alone_is_too_slow() -> None:
    assert prompt_tokens(STEPS, 60, 1e6, 0.01, 4096) == MIN_TOKENS
    assert prompt_tokens(STEPS, 60, 1e6, 0.01, 20) == 20


def test_nothing_is_held_back_while_nothing_is_known() -> None:
    assert prompt_tokens(StepModels(), 60, 1e6, 0.01, 4096) == 4096

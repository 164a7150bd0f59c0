"""Prompts beside decoding sequences: as much as the time per token allows, by the scheduler's own plans."""

from dataclasses import replace

import pytest

from core.config import EngineConfig
from core.pacing import (
    CATCH_UP_GAIN,
    CATCH_UP_SHARE,
    EASY_SHARE,
    GAINFUL,
    MIN_TOKENS,
    SHARE,
    prompt_tokens,
)
from core.plan import Sampled, StepPlan, StepResult
from core.steps import StepModel, StepModels
from core.types import Request, SamplingParams, Slo, TokenOut
from decode.headroom_policy import HeadroomPolicy
from engine.planning.step_scheduler import StepScheduler
from engine.planning.step_time_fit import expected_s

STEPS = StepModels(
    StepModel(fixed_s=0.008, num_steps=100),
    StepModel(fixed_s=0.008, token_s=25e-6, context_s=50e-9, seq_s=0.0, error=0.0, num_steps=100),
)


def _request(name: str, num_prompt: int, tpot_s: float, salt: int) -> Request:
    prompt = tuple(salt + i for i in range(num_prompt))
    return Request(
        id=name, prompt=prompt, sampling=SamplingParams(max_tokens=500), reply_to="f", slo=Slo(tpot_s=tpot_s)
    )


class Engine:
    """Its steps take what `STEPS` say."""

    def __init__(self) -> None:
        config = EngineConfig(max_batch_tokens=4096, max_num_seqs=64)
        self.scheduler = StepScheduler(config, 4000, 50_000, HeadroomPolicy())
        self.now = 0.0

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(self.now, STEPS)
        assert plan is not None
        return plan

    def finish(self, plan: StepPlan) -> None:
        self.now += expected_s(plan, STEPS)
        sampled = tuple(Sampled(work.key, 7) for work in plan.work if work.samples)
        self.scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled), self.now)

    def step(self) -> StepPlan:
        self.finish(plan := self.plan())
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
        count = prompt_tokens(STEPS, 20, 10_000, tpot_s, budget_tokens=4096)
        assert SHARE * tpot_s > base_s + count * STEPS.prompt.token_s
        assert abs(base_s + (count + 0.5) * STEPS.prompt.token_s - longest_s) <= STEPS.prompt.token_s


@pytest.mark.parametrize(("num_prompt", "share"), [(10_000, EASY_SHARE), (45_000, SHARE)])
def test_a_prompt_whose_own_work_takes_most_of_its_time_gets_longer_steps(
    num_prompt: int, share: float
) -> None:
    """Two seconds are the target; a token takes 25 us."""
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
    assert prompt_tokens(STEPS, 60, 1e6, 0.01, budget_tokens=4096) == MIN_TOKENS
    assert prompt_tokens(STEPS, 60, 1e6, 0.01, budget_tokens=20) == 20


def test_nothing_is_held_back_while_nothing_is_known() -> None:
    assert prompt_tokens(StepModels(), 60, 1e6, 0.01, budget_tokens=4096) == 4096


def _handed_over(engine: Engine, num_prompt: int, tpot_s: float) -> None:
    """A request whose blocks are reserved here, and whose prompt is computed elsewhere."""
    assert engine.scheduler.reserve(_request("short", num_prompt, tpot_s, 1_000)) is not None


def _activate(engine: Engine) -> None:
    engine.scheduler.activate(
        "short#0", [TokenOut(request_id="short", attempt=0, index=0, token=7)], engine.now
    )


@pytest.mark.parametrize("lookahead", [False, True])
def test_who_has_waited_behind_a_long_step_is_in_time_again_soon(lookahead: bool) -> None:
    """Also where the first step after the long one is planned while that still runs."""
    engine, tpot_s = Engine(), 0.07
    _handed_over(engine, 500, tpot_s)
    engine.scheduler.add(_request("long", 45_000, 1.0, 10_000))
    long = engine.plan()
    assert _prompt_part(long) == 4096
    _activate(engine)
    assert expected_s(long, STEPS) > 1.5 * tpot_s
    following = engine.plan() if lookahead else None
    engine.finish(long)
    following = following or engine.plan()
    behind_s = engine.now
    shorter_s = SHARE * tpot_s - CATCH_UP_SHARE * behind_s
    assert expected_s(following, STEPS) == pytest.approx(shorter_s, rel=0.05)
    engine.finish(following)
    for _ in range(4):
        engine.step()
    assert engine.now <= 5 * tpot_s
    for _ in range(12):
        engine.step()
    assert expected_s(engine.plan(), STEPS) == pytest.approx(SHARE * tpot_s, rel=0.05)


def test_prompts_go_on_at_half_the_full_rate_beside_one_that_is_behind_for_good() -> None:
    engine = Engine()
    _handed_over(engine, 500, 0.05)
    _activate(engine)
    engine.step()
    engine.now += 100.0
    engine.scheduler.add(_request("long", 30_000, 1.0, 10_000))
    fixed_s = STEPS.prompt.fixed_s
    for _ in range(5):
        prompt_s = _prompt_part(engine.step()) * STEPS.prompt.token_s
        assert prompt_s == pytest.approx(CATCH_UP_GAIN * fixed_s, rel=0.05)


def test_output_of_other_attempts_is_no_credit() -> None:
    """The client has waited for it, somewhere else."""
    rates = set[int]()
    for num_before in (0, 300):
        engine = Engine()
        request = _request("again", 500, 0.05, 1_000)
        engine.scheduler.add(replace(request, emitted=(7,) * num_before))
        engine.step()
        engine.now += 0.07
        engine.scheduler.add(_request("long", 30_000, 1.0, 10_000))
        rates.add(_prompt_part(engine.step()))
    most, least = max(rates), min(rates)
    assert most - least <= 0.01 * most
    assert most * STEPS.prompt.token_s < 0.75 * (SHARE * 0.05 - STEPS.prompt.fixed_s)

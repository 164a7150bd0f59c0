"""Prompts beside decoding sequences: as much as the time per token allows, by the scheduler's own plans."""

from dataclasses import replace

import pytest

from core.config.cluster_config import EngineConfig
from core.cost.steps import StepModel, StepModels
from core.pacing.pacing import prompt_tokens
from core.plan import Sampled, StepPlan, StepResult
from core.scheduler_tuning import DEFAULT_TUNING as TUNING
from core.types import Request, SamplingParams, Slo, TokenOut
from decode.headroom_policy import HeadroomPolicy
from engine.planning.step_scheduler import StepScheduler
from engine.planning.step_time_fit import expected_s

STEPS = StepModels(
    StepModel(fixed_s=0.008, num_steps=100),
    StepModel(fixed_s=0.008, token_s=25e-6, context_s=50e-9, seq_s=0.0, error=0.0, num_steps=100),
)
"""Nothing can be computed beside reading."""
WIDE = StepModels(
    StepModel(fixed_s=0.020, num_steps=100), StepModel(fixed_s=0.002, token_s=25e-6, num_steps=100)
)
"""720 tokens can."""
QUICK = StepModels(
    StepModel(fixed_s=0.0008, num_steps=100), StepModel(fixed_s=0.0008, token_s=2.5e-6, num_steps=100)
)
"""Ten times as quick as `STEPS`."""


def _request(name: str, num_prompt: int, tpot_s: float, salt: int, ttft_s: float = 100.0) -> Request:
    return Request(
        id=name,
        prompt=tuple(salt + i for i in range(num_prompt)),
        sampling=SamplingParams(max_tokens=500),
        reply_to="f",
        slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s),
    )


class Engine:
    """Its steps take what it believes."""

    def __init__(self, steps: StepModels = STEPS) -> None:
        self.steps = steps
        config = EngineConfig(max_batch_tokens=4096, max_num_seqs=64)
        self.scheduler = StepScheduler(config, 4000, 50_000, HeadroomPolicy())
        self.now = 0.0

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(self.now, self.steps)
        assert plan is not None
        return plan

    def finish(self, plan: StepPlan) -> None:
        self.now += expected_s(plan, self.steps)
        sampled = tuple(Sampled(work.key, 7) for work in plan.work if work.samples)
        self.scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled), self.now)

    def step(self) -> StepPlan:
        self.finish(plan := self.plan())
        return plan


def _prompt_part(plan: StepPlan) -> int:
    return sum(work.count for work in plan.work if work.count > 1)


def test_a_prompt_in_a_hurry_gets_all_the_time_until_the_next_token_is_due() -> None:
    """225 ms of work in 0.4 s."""
    for tpot_s in (0.02, 0.03, 0.045):
        engine = Engine()
        engine.scheduler.sequences.add(_request("loose", 100, 1.0, 1_000))
        engine.scheduler.sequences.add(_request("tight", 100, tpot_s, 2_000))
        assert _prompt_part(engine.step()) == 200
        engine.scheduler.sequences.add(_request("long", 9000, 1.0, 10_000, ttft_s=engine.now + 0.26))
        assert expected_s(engine.step(), STEPS) == pytest.approx(tpot_s, rel=0.01)


def test_what_a_sequence_got_early_it_may_spend_on_a_prompt_in_a_hurry() -> None:
    engine, tpot_s = Engine(), 0.05
    engine.scheduler.sequences.add(_request("early", 100, tpot_s, 1_000))
    engine.step()
    first_at = engine.now
    for _ in range(3):
        engine.step()
    ahead_s = first_at + 3 * tpot_s - engine.now
    assert ahead_s == pytest.approx(3 * (tpot_s - 0.008), rel=0.01)
    engine.scheduler.sequences.add(_request("long", 3000, 1.0, 10_000, ttft_s=engine.now + 0.0835))
    assert expected_s(engine.step(), STEPS) == pytest.approx(0.008 + 3000 * 25e-6, rel=0.02)


def test_steps_are_as_long_as_the_prompts_that_wait_need() -> None:
    """A prompt that needs three quarters of the time gets steps of four times what decoding takes, and is in time to a step."""
    engine = Engine(QUICK)
    engine.scheduler.sequences.add(_request("loose", 100, 0.02, 1_000))
    engine.step()
    due_at = engine.now + 9000 * 2.5e-6 / 0.75
    engine.scheduler.sequences.add(_request("long", 9000, 1.0, 10_000, ttft_s=due_at))
    engine.scheduler.sequences.add(_request("late", 9000, 1.0, 50_000, ttft_s=engine.now + 0.01))
    assert expected_s(engine.step(), QUICK) == pytest.approx(4 * 0.0008, rel=0.1)
    while engine.scheduler.load().num_decoding < 2:
        engine.step()
    assert abs(engine.now - due_at) < (1 + TUNING.gainful) * 0.0008


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_prompts_with_time_that_keep_others_waiting_get_nine_tenths_of_the_full_rate(
    num_prompts: int,
) -> None:
    """225 ms of work each, for which the scheduler lets more prompts wait. They have 100 s."""
    engine = Engine()
    engine.scheduler.sequences.add(_request("decodes", 100, 0.5, 1_000))
    engine.step()
    for i in range(num_prompts):
        engine.scheduler.sequences.add(_request(f"long{i}", 9000, 1.0, 10_000 * (i + 1)))
    plan = engine.step()
    assert _prompt_part(plan) * STEPS.prompt.token_s / expected_s(plan, STEPS) == pytest.approx(0.9, rel=0.01)


def test_prompts_with_time_are_computed_within_the_time_for_which_they_are_sent_ahead() -> None:
    """Half of that, or two thirds, is work. Steps are no longer than that asks for."""
    for share in (0.5, 2 / 3):
        engine = Engine(QUICK)
        engine.scheduler.sequences.add(_request("decodes", 100, 0.02, 1_000))
        engine.step()
        began_at, num_prompt = engine.now, int(share * TUNING.room_s / 2.5e-6)
        engine.scheduler.sequences.add(_request("long", num_prompt, 1.0, 10_000))
        assert expected_s(engine.step(), QUICK) <= (1 + TUNING.gainful) * 0.0008 * 1.02
        while engine.scheduler.load().num_decoding < 2:
            engine.step()
        assert engine.now - began_at <= TUNING.room_s


def test_prompts_with_time_use_up_nothing_that_a_sequence_has_in_reserve() -> None:
    """However many wait. What it got early is for prompts in a hurry."""
    engine, tpot_s = Engine(), 0.05
    engine.scheduler.sequences.add(_request("early", 100, tpot_s, 1_000))
    for _ in range(4):
        engine.step()
    for i in range(3):
        engine.scheduler.sequences.add(_request(f"long{i}", 9000, 1.0, 10_000 * (i + 1)))
    for _ in range(5):
        assert expected_s(engine.step(), STEPS) == pytest.approx(tpot_s, rel=0.02)


def test_prompts_that_have_time_make_steps_no_longer_than_they_gain_by_it() -> None:
    base_s = STEPS.prompt.step_s(20, 10_000, 21)
    for tpot_s in (0.07, 0.1, 0.3):
        count = prompt_tokens(STEPS, 20, 10_000, tpot_s, budget_tokens=4096, tuning=TUNING)
        step_s = STEPS.mixed_step_s(count + 20, 10_000 + count, 21)
        assert step_s == pytest.approx(base_s + TUNING.gainful * STEPS.prompt.fixed_s, rel=0.01)


@pytest.mark.parametrize("error", [0.0, 0.2, 0.9])
def test_prompts_beside_work_without_haste_get_full_steps_whatever_is_known_of_steps(error: float) -> None:
    """What they gain by it is unknown where the model says that steps have no overhead, and the model may be far off."""
    slow = replace(STEPS, prompt=replace(STEPS.prompt, fixed_s=0.0, error=error))
    engine = Engine(slow)
    engine.scheduler.sequences.add(_request("batch", 100, 10.0, 1_000))
    engine.step()
    engine.scheduler.sequences.add(_request("long", 9000, 10.0, 10_000))
    assert _prompt_part(engine.step()) == 4095
    assert prompt_tokens(slow, 1, 100, 10.0, budget_tokens=4095, tuning=TUNING) == 4095


@pytest.mark.parametrize("tpot_s", [0.01, 0.1])
def test_what_can_be_computed_while_a_step_reads_always_is(tpot_s: float) -> None:
    """Also where sequences are behind: without it they would not get their tokens sooner. They wait for no more than that."""
    engine = Engine(WIDE)
    engine.scheduler.sequences.add(_request("decodes", 100, tpot_s, 1_000))
    engine.step()
    engine.scheduler.sequences.add(_request("long", 9000, 1.0, 10_000))
    plan = engine.step()
    assert _prompt_part(plan) >= 719
    if tpot_s < 0.02:
        assert expected_s(plan, WIDE) <= 0.020 + 1e-9


def test_predictions_are_trusted_less_where_they_are_off() -> None:
    def longest_s(error: float) -> float:
        engine = Engine(replace(STEPS, prompt=replace(STEPS.prompt, error=error)))
        engine.scheduler.sequences.add(_request("decodes", 100, 0.05, 1_000))
        engine.step()
        engine.scheduler.sequences.add(_request("long", 9000, 1.0, 10_000, ttft_s=engine.now + 0.26))
        return expected_s(engine.step(), STEPS)

    assert longest_s(0.1) == pytest.approx(longest_s(0.0) / 1.2, rel=0.02)


def test_without_decoding_sequences_the_step_is_full() -> None:
    engine = Engine()
    engine.scheduler.sequences.add(_request("a", 9000, 0.01, 10_000))
    assert _prompt_part(engine.step()) == 4096


def test_a_sequence_whose_last_token_is_being_sampled_holds_no_prompt_back() -> None:
    """As all are that a prefill instance computes. The step after that is planned while it runs."""
    engine = Engine()
    last = _request("last", 100, 0.01, 1_000)
    engine.scheduler.sequences.add(replace(last, sampling=SamplingParams(max_tokens=1)))
    engine.plan()
    engine.scheduler.sequences.add(_request("long", 3000, 1.0, 10_000))
    assert _prompt_part(engine.plan()) == 3000


def test_prompts_go_on_where_decoding_alone_is_too_slow() -> None:
    slow = replace(STEPS, prompt=replace(STEPS.prompt, fixed_s=0.0))
    assert prompt_tokens(slow, 60, 1e6, 0.01, budget_tokens=4096, tuning=TUNING) == TUNING.min_tokens
    assert prompt_tokens(slow, 60, 1e6, 0.01, budget_tokens=20, tuning=TUNING) == 20


def test_nothing_is_held_back_while_nothing_is_known() -> None:
    assert prompt_tokens(StepModels(), 60, 1e6, 0.01, budget_tokens=4096, tuning=TUNING) == 4096


def _handed_over(engine: Engine, num_prompt: int, tpot_s: float) -> None:
    """A request whose blocks are reserved here, and whose prompt is computed elsewhere."""
    assert engine.scheduler.reservations.reserve(_request("short", num_prompt, tpot_s, 1_000)) is not None


def _activate(engine: Engine) -> None:
    engine.scheduler.reservations.activate(
        "short#0", [TokenOut(request_id="short", attempt=0, index=0, token=7)], engine.now
    )


@pytest.mark.parametrize("lookahead", [False, True])
def test_who_has_waited_behind_a_long_step_is_in_time_again_soon(lookahead: bool) -> None:
    """Also where the first step after the long one is planned while that still runs."""
    engine, tpot_s = Engine(), 0.07
    _handed_over(engine, 500, tpot_s)
    engine.scheduler.sequences.add(_request("long", 45_000, 1.0, 10_000))
    long = engine.plan()
    assert _prompt_part(long) == 4096
    _activate(engine)
    assert expected_s(long, STEPS) > 1.5 * tpot_s
    following = engine.plan() if lookahead else None
    engine.finish(long)
    following = following or engine.plan()
    assert (
        _prompt_part(following) * STEPS.prompt.token_s <= TUNING.catch_up_gain * STEPS.prompt.fixed_s + 1e-4
    )
    engine.finish(following)
    for _ in range(4):
        engine.step()
    assert engine.now <= 5 * tpot_s


def test_prompts_go_on_at_half_the_full_rate_beside_one_that_is_behind_for_good() -> None:
    engine = Engine()
    _handed_over(engine, 500, 0.05)
    _activate(engine)
    engine.step()
    engine.now += 100.0
    engine.scheduler.sequences.add(_request("long", 30_000, 1.0, 10_000))
    fixed_s = STEPS.prompt.fixed_s
    for _ in range(5):
        prompt_s = _prompt_part(engine.step()) * STEPS.prompt.token_s
        assert prompt_s == pytest.approx(TUNING.catch_up_gain * fixed_s, rel=0.05)


def test_output_of_other_attempts_is_no_credit() -> None:
    """The client has waited for it, somewhere else."""
    rates = set[int]()
    for num_before in (0, 300):
        engine = Engine()
        request = _request("again", 500, 0.05, 1_000)
        engine.scheduler.sequences.add(replace(request, emitted=(7,) * num_before))
        engine.step()
        engine.now += 0.07
        engine.scheduler.sequences.add(_request("long", 30_000, 1.0, 10_000))
        rates.add(_prompt_part(engine.step()))
    most, least = max(rates), min(rates)
    assert most - least <= 0.01 * most
    assert most * STEPS.prompt.token_s <= TUNING.catch_up_gain * STEPS.prompt.fixed_s + 1e-4

"""Step-time models learned from steps: against devices whose law is known."""

import random
from statistics import fmean

from hypothesis import given, settings
from hypothesis import strategies as st

from core.plan import SeqWork, StepPlan
from core.steps import StepModel, StepModels
from engine.planning.step_time_fit import StepFit, StepFits

LAW = StepModel(fixed_s=0.008, token_s=30e-6, context_s=25e-9, seq_s=10e-6)


def _law_s(tokens: int, context: int, seqs: int) -> float:
    return LAW.step_s(tokens, context, seqs)


def _random_step(rng: random.Random) -> tuple[int, int, int]:
    seqs = rng.randint(1, 64)
    return rng.randint(seqs, 2048), rng.randint(seqs * 100, seqs * 8000), seqs


def test_a_linear_device_is_learned_from_its_own_steps() -> None:
    rng, fit = random.Random(1), StepFit()
    for _ in range(400):
        step = _random_step(rng)
        fit.observe(*step, _law_s(*step))
    model = fit.model()
    assert model.error < 0.01
    for step in ((1, 100, 1), (4096, 500_000, 128)):  # beyond what it has seen
        assert abs(model.step_s(*step) / _law_s(*step) - 1) < 0.03


def test_noise_is_averaged_and_shows_as_the_error() -> None:
    rng, fit = random.Random(2), StepFit()
    for _ in range(1000):
        step = _random_step(rng)
        fit.observe(*step, _law_s(*step) * rng.uniform(0.9, 1.1))
    model = fit.model()
    assert 0.03 < model.error < 0.08  # the mean of |U(-0.1, 0.1)| is 0.05
    steps = [_random_step(rng) for _ in range(200)]
    assert fmean(abs(model.step_s(*s) / _law_s(*s) - 1) for s in steps) < 0.02


def test_a_disturbed_step_does_not_spoil_the_model() -> None:
    rng, fit = random.Random(3), StepFit()
    for i in range(600):
        step = _random_step(rng)
        fit.observe(*step, _law_s(*step) * (20 if i % 50 == 49 else 1))
    steps = [_random_step(rng) for _ in range(200)]
    assert fmean(abs(fit.model().step_s(*s) / _law_s(*s) - 1) for s in steps) < 0.1


def test_a_device_that_changes_is_followed() -> None:
    rng, fit = random.Random(4), StepFit()
    for factor in (1.0, 1.6):
        for _ in range(1500):
            step = _random_step(rng)
            fit.observe(*step, factor * _law_s(*step))
    assert abs(fit.model().step_s(512, 50_000, 16) / (1.6 * _law_s(512, 50_000, 16)) - 1) < 0.05


def test_steps_that_are_all_alike_for_hours_do_not_make_it_forget_or_diverge() -> None:
    rng, fit = random.Random(5), StepFit()
    for _ in range(400):
        step = _random_step(rng)
        fit.observe(*step, _law_s(*step))
    for _ in range(50_000):
        fit.observe(16, 20_000, 16, _law_s(16, 20_000, 16))
    assert abs(fit.model().step_s(16, 20_000, 16) / _law_s(16, 20_000, 16) - 1) < 0.01
    for _ in range(50):
        step = _random_step(rng)
        fit.observe(*step, _law_s(*step))
    assert abs(fit.model().step_s(1024, 100_000, 32) / _law_s(1024, 100_000, 32) - 1) < 0.05


def test_a_profile_is_used_from_the_first_step_on() -> None:
    prior = StepModel(fixed_s=0.008, token_s=30e-6, context_s=25e-9, seq_s=10e-6, error=0.02, num_steps=500)
    fits = StepFits(StepModels(prompt=prior))
    assert abs(fits.models.prompt.step_s(512, 50_000, 16) / _law_s(512, 50_000, 16) - 1) < 1e-6
    assert fits.models.decode.num_steps == 0


def test_the_two_regimes_are_told_apart_by_the_plan() -> None:
    fits = StepFits()
    decode = StepPlan(
        step=0,
        new=(),
        copies=(),
        work=tuple(SeqWork(key=f"s{i}", start=99, count=1, block_ids=(), samples=True) for i in range(3)),
        drop=(),
    )
    prompt = StepPlan(
        step=1,
        new=(),
        copies=(),
        work=(*decode.work, SeqWork(key="p", start=0, count=200, block_ids=(), samples=False)),
        drop=(),
    )
    for _ in range(200):
        fits.observe(decode, 0.010)
        fits.observe(prompt, 0.030)
    fits.observe(prompt, 0.0)
    assert (fits.models.decode.num_steps, fits.models.prompt.num_steps) == (200, 200)
    assert abs(fits.models.decode.step_s(3, 300, 3) - 0.010) < 1e-4
    assert abs(fits.models.prompt.step_s(203, 500, 4) - 0.030) < 1e-4


_step = st.tuples(st.integers(1, 4096), st.integers(1, 1_000_000), st.integers(1, 256), st.floats(1e-4, 5.0))


@given(st.lists(_step, min_size=1, max_size=80))
@settings(max_examples=100, deadline=None)
def test_whatever_is_seen_no_prediction_is_negative(steps: list[tuple[int, int, int, float]]) -> None:
    fit = StepFit()
    for tokens, context, seqs, duration_s in steps:
        fit.observe(tokens, context, seqs, duration_s)
    model = fit.model()
    assert min(model.fixed_s, model.token_s, model.context_s, model.seq_s) >= 0
    assert 0 <= model.error <= 1

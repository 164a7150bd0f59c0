"""Step-time models learned from steps: against devices whose step-time model is known."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add, mul
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cost.steps import UNKNOWN_STEPS, StepModel, StepModels, chunk_pairs, with_experts
from core.plan import SeqWork, StepPlan
from engine.planning.least_squares import LeastSquares
from engine.planning.step_time_fit import StepFit, StepFits, expected_s
from sim.catalogue.catalogue import GPUS, MODELS, step_cost
from sim.catalogue.cost import StepCost

TRUTH = StepModel(fixed_s=0.008, token_s=30e-6, context_s=25e-9, seq_s=10e-6)


def _true_s(tokens: int, context: int, seqs: int) -> float:
    return TRUTH.step_s(tokens, context, seqs)


def _work(key: str, start: int, count: int) -> SeqWork:
    return SeqWork(key=key, start=start, count=count, block_ids=(), samples=True)


def _random_step(rng: random.Random) -> tuple[int, int, int]:
    seqs = rng.randint(1, 64)
    return rng.randint(seqs, 2048), rng.randint(seqs * 100, seqs * 8000), seqs


def test_a_linear_device_is_learned_from_its_own_steps() -> None:
    rng, fit = random.Random(1), StepFit()
    for _ in range(400):
        step = _random_step(rng)
        fit.observe(*step, _true_s(*step))
    model = fit.model()
    assert model.error < 0.01
    for step in ((1, 100, 1), (4096, 500_000, 128)):  # beyond what it has seen
        assert abs(model.step_s(*step) / _true_s(*step) - 1) < 0.03


def test_noise_is_averaged_and_shows_as_the_error() -> None:
    rng, fit = random.Random(2), StepFit()
    for _ in range(1000):
        step = _random_step(rng)
        fit.observe(*step, _true_s(*step) * rng.uniform(0.9, 1.1))
    model = fit.model()
    assert 0.03 < model.error < 0.08  # the mean of |U(-0.1, 0.1)| is 0.05
    steps = [_random_step(rng) for _ in range(200)]
    assert fmean(abs(model.step_s(*s) / _true_s(*s) - 1) for s in steps) < 0.02


def test_a_step_time_model_that_is_lost_is_unknown_until_it_is_learned_anew() -> None:
    """It would say that steps take no time, and that it knows."""
    rng, fit = random.Random(4), StepFit()
    for factor in (1.0, 10.0):
        for _ in range(60):
            step = _random_step(rng)
            fit.observe(*step, factor * _true_s(*step))
            model = fit.model()
            assert not model.num_steps or model.step_s(*step) > 0.05 * _true_s(*step)
    assert 0 < model.num_steps < 60
    assert abs(model.step_s(1000, 50_000, 30) / (10 * _true_s(1000, 50_000, 30)) - 1) < 0.1


def test_a_disturbed_step_does_not_spoil_the_model() -> None:
    rng, fit = random.Random(3), StepFit()
    for i in range(600):
        step = _random_step(rng)
        fit.observe(*step, _true_s(*step) * (20 if i % 50 == 49 else 1))
    steps = [_random_step(rng) for _ in range(200)]
    assert fmean(abs(fit.model().step_s(*s) / _true_s(*s) - 1) for s in steps) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_compilers_hold_up_at_the_start_are_forgotten(seed: int) -> None:
    rng, fit = random.Random(seed), StepFit()
    shares: list[float] = []
    for number in range(300):
        seqs = rng.randint(20, 200)
        step = 64 + seqs, 500 * seqs, seqs + 1
        held_up_s = 2.0 * rng.random() ** 2 if number < 30 else 0.0
        shares.append(fit.model().step_s(*step) / _true_s(*step))
        fit.observe(*step, _true_s(*step) + held_up_s)
    assert fmean(abs(share - 1) for share in shares[100:]) < 0.1
    assert fit.model().error < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_prompts_that_were_all_alike_do_not_spoil_what_is_said_of_others(seed: int) -> None:
    """Alone, prompts have as many tokens as context: which of them takes long is not seen."""
    rng, fits = random.Random(seed), StepFits()

    def observe(decoding: int, count: int) -> float:
        held = [_work(str(number), rng.randint(1000, 1088), 1) for number in range(decoding)]
        plan = StepPlan(
            step=0, new=(), copies=(), work=(*held, *([_work("p", 0, count)] if count else ())), drop=()
        )
        size = plan.size
        took_s = (
            0.0048 if size.num_tokens < 100 else 0.0028 + 20e-6 * size.num_tokens
        ) + 32e-9 * size.num_context
        expected = expected_s(plan, fits.models)
        fits.observe(plan, took_s * rng.uniform(0.95, 1.05))
        return expected / took_s

    for _ in range(30):
        observe(0, 1024)
        for _ in range(30):
            observe(1, 0)
    shares = [observe(rng.randint(10, 15), rng.choice((64, 64, 64, 1024))) for _ in range(200)]
    assert fmean(abs(share - 1) for share in shares[100:]) < 0.4


def test_a_device_that_changes_is_followed() -> None:
    rng, fit = random.Random(4), StepFit()
    for factor in (1.0, 1.6):
        for _ in range(1500):
            step = _random_step(rng)
            fit.observe(*step, factor * _true_s(*step))
    assert abs(fit.model().step_s(512, 50_000, 16) / (1.6 * _true_s(512, 50_000, 16)) - 1) < 0.05


def test_steps_that_are_all_alike_for_hours_do_not_make_it_forget_or_diverge() -> None:
    rng, fit = random.Random(5), StepFit()
    for _ in range(400):
        step = _random_step(rng)
        fit.observe(*step, _true_s(*step))
    for _ in range(50_000):
        fit.observe(16, 20_000, 16, _true_s(16, 20_000, 16))
    assert abs(fit.model().step_s(16, 20_000, 16) / _true_s(16, 20_000, 16) - 1) < 0.01
    for _ in range(50):
        step = _random_step(rng)
        fit.observe(*step, _true_s(*step))
    assert abs(fit.model().step_s(1024, 100_000, 32) / _true_s(1024, 100_000, 32) - 1) < 0.05


def test_a_profile_is_used_from_the_first_step_on() -> None:
    prior = StepModel(fixed_s=0.008, token_s=30e-6, context_s=25e-9, seq_s=10e-6, error=0.02, num_steps=500)
    fits = StepFits(StepModels(prompt=prior))
    assert abs(fits.models.prompt.step_s(512, 50_000, 16) / _true_s(512, 50_000, 16) - 1) < 1e-6
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


ROOFS = {
    name: step_cost(replace(GPUS["H100"], memory_bytes_per_s=bandwidth), MODELS["llama-3.1-8b"])
    for name, bandwidth in {"fast memory": 6700e9, "slow memory": 1675e9}.items()
}


def _roof_s(cost: StepCost, batch: int, context: int, count: int) -> float:
    pairs = context + chunk_pairs(0, count)
    return cost.step_s(batch + count, context + count, pairs, batch + (count > 0))


def _served(
    fits: StepFits, cost: StepCost, num: int, most_tokens: int, rng: random.Random, pause: int = 4
) -> None:
    """Steps in turn, with noise, and with pauses in one of fifty."""
    for number in range(num):
        batch, count = rng.randint(1, 64), rng.choice((0, rng.randint(16, most_tokens)))
        context = batch * rng.randint(100, 3000)
        duration_s = _roof_s(cost, batch, context, count) * rng.gauss(1, 0.02)
        duration_s *= pause if number % 50 == 49 else 1
        if count:
            sizes = batch + count, context + count, batch + 1
            fits.observe_mixed(*sizes, duration_s, chunk_pairs(0, count))
        else:
            fits.observe_decode(batch, context, batch, duration_s)


@pytest.mark.parametrize("name", ROOFS)
def test_where_reading_ends_and_computing_begins_is_learned(name: str) -> None:
    cost, fits, rng = ROOFS[name], StepFits(), random.Random(6)
    _served(fits, cost, 1200, 2048, rng)
    off: list[float] = []
    for count in (32, 128, 256, 512, 1024, 2000):
        for batch, context in ((8, 8_000), (32, 40_000), (64, 100_000)):
            found_s = fits.models.mixed_step_s(
                batch + count, context + count, batch + 1, chunk_pairs(0, count)
            )
            off.append(abs(found_s / _roof_s(cost, batch, context, count) - 1))
    assert fmean(off) < 0.05
    assert fits.models.prompt.error < 0.1


@pytest.mark.parametrize("pause", [1, 4])
def test_prompts_that_were_computed_while_steps_read_do_not_make_others_free(pause: int) -> None:
    """Computing 8,000 tokens is not free only because computing 60 was never seen to take any time."""
    cost, fits, rng = ROOFS["slow memory"], StepFits(), random.Random(7)
    _served(fits, cost, 400, 60, rng, pause)
    true_s = _roof_s(cost, 16, 16_000, 8_000)
    found_s = fits.models.mixed_step_s(8_016, 24_000, 17, chunk_pairs(0, 8_000))
    assert 0.33 * true_s < found_s < 40 * true_s
    _served(fits, cost, 1200, 4096, rng, pause)
    found_s = fits.models.mixed_step_s(8_016, 24_000, 17, chunk_pairs(0, 8_000))
    assert abs(found_s / true_s - 1) < 0.35


def test_reading_that_takes_less_than_it_did_is_learned_from_steps_with_prompts_too() -> None:
    cost, fits = ROOFS["fast memory"], StepFits()
    for _ in range(50):
        fits.observe_decode(1, 100, 1, 0.040)
    true_s = _roof_s(cost, 1, 8_000, 64)
    before_s = fits.models.decode.step_s(2, 8_000, 2)
    assert before_s > 5 * true_s
    for _ in range(300):
        fits.observe_mixed(1 + 64, 8_064, 2, true_s, chunk_pairs(0, 64))
    found_s = fits.models.mixed_step_s(1 + 64, 8_064, 2, chunk_pairs(0, 64))
    assert 0.9 * true_s < found_s < 0.7 * before_s


_mixed = st.tuples(st.integers(1, 4096), st.integers(1, 1_000_000), st.integers(1, 256), st.floats(1e-4, 5.0))


@given(st.lists(st.tuples(st.booleans(), _mixed), min_size=1, max_size=80))
@settings(max_examples=100, deadline=None)
def test_whatever_is_seen_more_tokens_never_take_less_time(
    steps: list[tuple[bool, tuple[int, int, int, float]]],
) -> None:
    fits = StepFits()
    for decodes, (tokens, context, seqs, duration_s) in steps:
        if decodes:
            fits.observe_decode(seqs, context, seqs, duration_s)
        else:
            fits.observe_mixed(tokens + seqs, context, seqs, duration_s, chunk_pairs(0, tokens))
    times = [fits.models.mixed_step_s(n, 1000 + n, 5, chunk_pairs(0, n)) for n in (1, 10, 100, 1000, 10_000)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_least_squares_that_are_written_out_have_the_bits_of_the_textbooks() -> None:
    """Haykin's recursion over whole matrices, with its forgetting and where that stops."""

    def total(a: Sequence[float], b: Sequence[float]) -> float:
        return reduce(add, map(mul, a, b))  # `sum` of floats rounds otherwise from Python 3.12 on

    rng, written = random.Random(8), LeastSquares((0.0, 0.01, 0.0, 0.0, 0.0), 1.0)
    theta, every = [0.0, 0.01, 0.0, 0.0, 0.0], range(5)
    p = [[float(i == j) for j in every] for i in every]
    for _ in range(3000):
        x, residual = tuple(rng.random() for _ in every), rng.gauss(0, 1)
        if rng.random() < 0.9:  # variances of what is seldom seen grow to the limit
            x = (x[0], x[1], 0.0, 0.0, 0.0)
        px = [total(row, x) for row in p]
        kept = 0.995 if max(p[i][i] for i in every) < 1e4 else 1.0
        gain = 1.0 / (kept + total(x, px))
        theta = [t + a * gain * residual for t, a in zip(theta, px, strict=True)]
        p = [[(p[i][j] - px[i] * px[j] * gain) / kept for j in every] for i in every]
        written.learn((x[0], x[1], x[2], x[3], x[4]), residual)
        assert written.theta == tuple(theta)


ROUTED = {
    "8 of 256": StepCost(
        weights_read_s=0.001, experts_read_s=0.021, expert_share=8 / 256, tokens_per_s=64_000
    ),
    "2 of 8": StepCost(weights_read_s=0.003, experts_read_s=0.017, expert_share=2 / 8, tokens_per_s=40_000),
}


def _decoded(fits: StepFits, cost: StepCost, num: int, largest: int, rng: random.Random) -> None:
    """Steps that only decode, with noise, and with pauses in one of fifty."""
    for number in range(num):
        batch = rng.randint(1, largest)
        context = batch * rng.randint(100, 3000)
        noise = rng.gauss(1, 0.02) * (4 if number % 50 == 49 else 1)
        fits.observe_decode(batch, context, batch, _roof_s(cost, batch, context, 0) * noise)


def _off(fits: StepFits, cost: StepCost, batches: Sequence[int]) -> float:
    """Return by how much predictions are off in the mean."""
    pairs = [(fits.models.decode.step_s(n, 1000 * n, n), _roof_s(cost, n, 1000 * n, 0)) for n in batches]
    return fmean(abs(found_s / true_s - 1) for found_s, true_s in pairs)


@pytest.mark.parametrize("name", ROUTED)
def test_where_experts_are_routed_reading_ends_once_all_are_read(name: str) -> None:
    cost, batches = ROUTED[name], (1, 4, 16, 64, 256, 512)
    line, bent = StepFits(), StepFits(with_experts(UNKNOWN_STEPS, cost.unread_decay))
    for fits in (line, bent):
        _decoded(fits, cost, 600, 512, random.Random(9))
    assert _off(bent, cost, batches) < 0.03 < 0.1 < _off(line, cost, batches)
    assert bent.models.decode.error < 0.08


@pytest.mark.parametrize("name", ROUTED)
def test_batches_that_were_never_seen_read_what_is_left_of_the_experts(name: str) -> None:
    cost = ROUTED[name]
    fits = StepFits(with_experts(UNKNOWN_STEPS, cost.unread_decay))
    _decoded(fits, cost, 600, 24, random.Random(10))
    assert _off(fits, cost, (64, 256, 512)) < 0.25


@pytest.mark.parametrize("seed", range(5))
def test_batches_that_all_read_all_experts_teach_no_part_that_is_negative(seed: int) -> None:
    """They cannot tell experts from what is fixed."""
    cost, rng = ROUTED["2 of 8"], random.Random(seed)
    fits = StepFits(with_experts(UNKNOWN_STEPS, cost.unread_decay))
    for number in range(2000):
        batch = rng.randint(60, 90)
        true_s = _roof_s(cost, batch, 1000 * batch, 0)
        if number > 50:
            assert 0 <= fits.models.decode.unread_s <= fits.models.decode.fixed_s
            assert fits.models.decode.step_s(batch, 1000 * batch, batch) == pytest.approx(true_s, rel=0.1)
        fits.observe_decode(batch, 1000 * batch, batch, true_s * rng.gauss(1, 0.03))


def test_steps_with_prompts_read_the_experts_that_their_prompts_use() -> None:
    """Taken for computing, that would make each piece of a prompt as dear as all experts."""
    cost, rng = ROUTED["8 of 256"], random.Random(11)
    fits = StepFits(with_experts(UNKNOWN_STEPS, cost.unread_decay))
    _served(fits, cost, 1200, 4096, rng)
    off = [
        fits.models.mixed_step_s(batch + count, 1000 * batch + count, batch + 1, chunk_pairs(0, count))
        / _roof_s(cost, batch, 1000 * batch, count)
        - 1
        for batch in (2, 16, 64)
        for count in (64, 256, 1000, 4000)
    ]
    assert fmean(map(abs, off)) < 0.04


def test_a_device_without_experts_is_learned_bit_by_bit_as_before_there_were_any() -> None:
    cost, models = ROOFS["fast memory"], list[StepModels]()
    for known in (None, with_experts(UNKNOWN_STEPS, cost.unread_decay)):
        fits = StepFits(known)
        _served(fits, cost, 300, 2048, random.Random(12))
        models.append(fits.models)
    assert models[0] == models[1]
    assert models[0].decode.unread_s == models[0].decode.unread_decay == 0.0


def test_what_was_known_of_experts_is_where_learning_goes_on() -> None:
    cost = ROUTED["8 of 256"]
    before = StepFits(with_experts(UNKNOWN_STEPS, cost.unread_decay))
    _decoded(before, cost, 600, 512, random.Random(13))
    after = StepFits(before.models)
    for n in (1, 16, 256):
        known_s = before.models.decode.step_s(n, 1000 * n, n)
        assert after.models.decode.step_s(n, 1000 * n, n) == pytest.approx(known_s)


@given(st.lists(_step, min_size=1, max_size=80))
@settings(max_examples=100, deadline=None)
def test_whatever_is_seen_where_experts_are_routed_larger_batches_take_no_less_time(
    steps: list[tuple[int, int, int, float]],
) -> None:
    fits = StepFits(with_experts(UNKNOWN_STEPS, 0.03))
    for _, context, seqs, duration_s in steps:
        fits.observe_decode(seqs, context, seqs, duration_s)
    times = [fits.models.decode.step_s(n, 1000, n) for n in (1, 2, 10, 100, 1000)]
    assert times == sorted(times)
    assert times[0] >= 0

"""What sequences will hold, against outputs that are drawn from the same distribution and generated step by step."""

import random
from collections.abc import Sequence
from math import pi, sin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.fleet.context_forecast import (
    HORIZONS,
    NO_CONTEXTS,
    Contexts,
    added,
    forecast,
    growth,
    without,
)
from cluster.scheduler.fleet.length_curve import expected_curve
from cluster.scheduler.fleet.reservation import growth_blocks
from core.scheduler_tuning import DEFAULT_TUNING as TUNING

MEAN, SHAPE, NO_LIMIT = 256, 2.5, 1 << 20
CURVE = expected_curve(MEAN, TUNING.length_shape)


def lengths(rng: random.Random, count: int, longer_than: int = 0) -> list[int]:
    """Draw from the log-logistic distribution of `CURVE`."""
    scale = MEAN * sin(pi / SHAPE) / (pi / SHAPE)
    found = list[int]()
    while len(found) < count:
        u = rng.random()
        length = round(1 + scale * (u / (1 - u)) ** (1 / SHAPE))
        if length > longer_than:
            found.append(length)
    return found


def held(ends: Sequence[int], num_prompt: int, num_output: int, steps: int) -> int:
    return sum(num_prompt + num_output + steps for end in ends if end > num_output + steps)


@pytest.mark.parametrize(("num_prompt", "num_output"), [(0, 0), (300, 0), (100, 181), (0, 1024)])
def test_sequences_hold_in_the_mean_what_is_expected(num_prompt: int, num_output: int) -> None:
    ends = lengths(random.Random(1), 4000, longer_than=num_output)
    expected = forecast(CURVE, num_prompt, num_output, NO_LIMIT, TUNING.chance)
    for steps, tokens in zip(HORIZONS, expected[:-1], strict=True):
        assert held(ends, num_prompt, num_output, steps) / len(ends) == pytest.approx(tokens, rel=0.18)
    rest = sum(min(end - num_output, HORIZONS[-1]) for end in ends) / len(ends)
    assert expected[-1] == pytest.approx(1.5 * rest, rel=0.15)


def test_nothing_is_held_behind_the_last_token_that_was_allowed() -> None:
    assert forecast(CURVE, 100, 0, 200, TUNING.chance)[3:6] == (0.0, 0.0, 0.0)
    assert forecast(CURVE, 100, 150, 200, TUNING.chance)[1:6] == (0.0,) * 5


@pytest.mark.parametrize(("count", "enough"), [(1, 75), (4, 80), (16, 85), (64, 90), (256, 95)])
def test_room_is_left_for_what_they_grow_to_but_for_a_few_draws(count: int, enough: int) -> None:
    rng, num_prompt = random.Random(count), 32
    contexts = NO_CONTEXTS
    for _ in range(count):
        contexts = added(contexts, forecast(CURVE, num_prompt, 0, NO_LIMIT, TUNING.chance))
    room = contexts[0] + growth_blocks(contexts, count, 1)
    draws = [lengths(rng, count) for _ in range(100)]
    most = [max(held(ends, num_prompt, 0, steps) for steps in range(0, 2048, 8)) for ends in draws]
    assert sum(tokens <= room for tokens in most) >= enough
    assert room < count * (num_prompt + MEAN) or count < 16, "not all reach their mean at once"


TOKENS = st.floats(0, 1e6)
CONTEXTS = st.tuples(TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS)


@given(CONTEXTS, CONTEXTS)
def test_what_is_added_can_be_taken_away(a: Contexts, b: Contexts) -> None:
    assert without(added(a, b), b) == pytest.approx(a, abs=1e-3)
    assert growth(added(a, b)) <= growth(a) + growth(b) + 1e-3

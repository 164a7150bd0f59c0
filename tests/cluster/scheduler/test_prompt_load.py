"""How much longer prompts make steps, beside integrals and draws."""

import random
from math import inf

import pytest

from cluster.scheduler.placement.prompt_load import PromptLoad, longer_s


@pytest.mark.parametrize("computes_s", [0.01, 0.03, 0.04, 0.06])
@pytest.mark.parametrize("deviation_s", [0.0, 0.002, 0.02])
def test_the_mean_of_the_longer_of_two_times_is_that_of_draws(computes_s: float, deviation_s: float) -> None:
    rng = random.Random(1)
    drawn = [max(0.04, rng.gauss(computes_s, deviation_s)) for _ in range(20_000)]
    assert longer_s(0.04, computes_s, deviation_s) == pytest.approx(sum(drawn) / len(drawn), abs=0.0005)


def test_no_prompts_make_no_step_longer() -> None:
    assert PromptLoad().step_s(0.02, 0.03) == 0.02


def test_a_steady_flow_of_prompts_takes_its_share_of_what_a_step_reads() -> None:
    """It is 50 prompts of 10 ms a second on two instances."""
    for lives_s in (5.0, inf):
        load = PromptLoad()
        for i in range(2000):
            load.placed(0.01, 0.5, lives_s, 2, 100 + i / 50)
        assert load.step_s(0.02, 0.018) == pytest.approx(0.018 + 0.25 * 0.02, rel=0.01)


def test_prompts_are_as_uneven_as_those_that_come_at_random() -> None:
    """Each takes its share of the time until it is due, for so long. The truth is drawn."""
    rng, load, at, within_s = random.Random(2), PromptLoad(), 0.0, 0.5
    ends, shares = list[tuple[float, float]](), list[float]()
    for _ in range(4000):
        at += rng.expovariate(20)
        work_s = rng.choice((0.005, 0.04))
        ends = [(end, one) for end, one in ends if end > at]
        shares.append(sum(one for _, one in ends))
        ends.append((at + within_s, work_s / within_s))
        load.placed(work_s, within_s, 60.0, 1, at)
    expected_s = sum(max(0.04, 0.02 + share * 0.04) for share in shares) / len(shares)
    assert load.step_s(0.04, 0.02) == pytest.approx(expected_s, rel=0.02)


def test_prompts_that_came_at_once_count_until_they_are_due() -> None:
    load = PromptLoad()
    for _ in range(10):
        load.placed(0.02, 2.0, 8.0, 1, 5.0)
    assert load.step_s(0.02, 0.018) >= 0.018 + 0.1 * 0.02


def test_prompts_are_forgotten_after_sequences_have_lived_on() -> None:
    load = PromptLoad()
    for i in range(100):
        load.placed(0.5, 1.0, 2.0, 1, i / 100)
    load.placed(0.001, 1.0, 2.0, 1, 60.0)
    assert load.step_s(0.02, 0.01) == pytest.approx(0.02, rel=1e-3)

"""Output lengths: a cold fleet's, those that change, those of tenants, and forgetting."""

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

from cluster.scheduler.fleet.output_lengths import OutputLengths
from core.output_marks import next_mark
from core.scheduler_tuning import DEFAULT_TUNING as TUNING

TOKENS_PER_S = 25.0


def end_all(
    lengths: OutputLengths, num_tokens: int, times: int, tenant: str = "", slo_class: str = "chat"
) -> None:
    for _ in range(times):
        lengths.begin(tenant, slo_class).ended(num_tokens)


def served(
    lengths: OutputLengths, rate: float, length_at: Callable[[float], int]
) -> Iterator[tuple[float, list[int]]]:
    """Yield (time, lengths of all that have ended) at each arrival of an endless load. Outputs grow by so many tokens a second,
    and reports name them at their marks."""
    rng, now, numbers = random.Random(3), 0.0, count()
    ended = list[int]()
    due = list[tuple[float, int, int, int, object]]()
    while True:
        now += rng.expovariate(rate)
        while due and due[0][0] <= now:
            at, _, num_tokens, length, output = heapq.heappop(due)
            if num_tokens == length:
                output.ended(length)  # type: ignore[attr-defined]
                ended.append(length)
                continue
            output.grown(num_tokens)  # type: ignore[attr-defined]
            after = min(length, next_mark(num_tokens))
            heapq.heappush(
                due, (at + (after - num_tokens) / TOKENS_PER_S, next(numbers), after, length, output)
            )
        length, output = length_at(now), lengths.begin("", "chat")
        first = min(length, next_mark(0))
        heapq.heappush(due, (now + first / TOKENS_PER_S, next(numbers), first, length, output))
        yield now, ended


def exponential(mean: float) -> Callable[[float], int]:
    rng = random.Random(1)
    return lambda _: 1 + int(rng.expovariate(1 / mean))


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9, 0.99])
def test_quantiles_are_right_to_a_fifth(share: float) -> None:
    rng, lengths = random.Random(1), OutputLengths()
    seen = [int(rng.lognormvariate(5, 1)) + 1 for _ in range(400)]
    for num_tokens in seen:
        lengths.begin("", "chat").ended(num_tokens)
    exact = float(np.quantile(seen, share))
    curve = lengths.curve("", "chat")
    assert curve.quantile(share) == pytest.approx(exact, rel=0.25)
    assert curve.mean == pytest.approx(np.mean(seen), rel=0.1)


@pytest.mark.parametrize("mean", [200, 800, 3000])
def test_a_cold_fleet_is_not_misled_by_those_that_end_first(mean: int) -> None:
    """After a mean output's time only the shorter ones can have ended."""
    lengths = OutputLengths()
    load = served(lengths, 20.0, exponential(mean))
    ended = next(ended for now, ended in load if now > mean / TOKENS_PER_S)
    assert np.mean(ended) < 0.5 * mean
    assert lengths.curve("", "chat").mean == pytest.approx(mean, rel=0.25)


def test_outputs_of_which_none_has_ended_are_taken_to_go_on_as_long_as_they_have_come() -> None:
    lengths = OutputLengths()
    running = [lengths.begin("", "chat") for _ in range(200)]
    means = list[float]()
    for num_tokens in (16, 64, 256, 1024):
        for output in running:
            output.grown(num_tokens)
        means.append(lengths.curve("", "chat").mean)
    assert means == sorted(means)
    assert means[0] == pytest.approx(TUNING.expected_tokens, rel=0.1)
    assert 1400 < means[-1] < 2600
    assert lengths.num_ended == 0


def test_a_mean_glides() -> None:
    """From one arrival to the next it changes by two fifths at the most, where it used to fall from 256 to that of the first twenty."""
    lengths, before = OutputLengths(), TUNING.expected_tokens
    for now, _ in served(lengths, 20.0, exponential(900)):
        mean = lengths.curve("", "chat").mean
        assert 0.7 < mean / before < 1.4
        before = mean
        if now > 60:
            break


def test_lengths_that_change_are_followed_there_and_back() -> None:
    short, long = exponential(100), exponential(1000)
    lengths = OutputLengths()
    for now, _ in served(lengths, 20.0, lambda now: (long if 100 <= now < 250 else short)(now)):
        mean = lengths.curve("", "chat").mean
        if 60 < now < 100 or now > 380:
            assert mean == pytest.approx(100, rel=0.3)
        if 170 < now < 250:
            assert mean == pytest.approx(1000, rel=0.3)
        if now > 400:
            return


def test_little_is_known_of_a_tenant_at_first() -> None:
    lengths = OutputLengths()
    assert lengths.curve("a", "chat").mean == pytest.approx(TUNING.expected_tokens, rel=0.03)
    end_all(lengths, 100, 300, "b")
    assert lengths.curve("a", "chat") is lengths.curve("", "chat")
    assert lengths.curve("a", "batch").mean == pytest.approx(100, rel=0.1)
    end_all(lengths, 1000, 30, "a")
    mine, theirs = (lengths.curve(tenant, "chat").quantile(0.5) for tenant in ("a", "b"))
    assert mine > 5 * theirs


def test_what_was_long_ago_is_forgotten() -> None:
    lengths = OutputLengths()
    end_all(lengths, 50, 20_000)
    end_all(lengths, 2000, 3000)
    curve = lengths.curve("", "chat")
    assert curve.quantile(0.1) > 1500
    assert curve.mean == pytest.approx(2000, rel=0.02)


def test_one_that_was_given_up_counts_as_far_as_it_came() -> None:
    lengths = OutputLengths()
    for _ in range(300):
        lengths.begin("", "chat").ended(400)
        lengths.begin("", "chat").grown(100)
    assert lengths.curve("", "chat").mean == pytest.approx(400, rel=0.05)


def test_tenants_that_come_and_go_are_not_kept_for_ever() -> None:
    lengths = OutputLengths()
    lengths.begin("first", "chat").ended(3000)
    for i in range(4000):
        lengths.begin(f"t{i}", "chat").ended(10)
    assert lengths.curve("first", "chat").mean > lengths.curve("nobody", "chat").mean
    for i in range(4000, 8000):
        lengths.begin(f"t{i}", "chat").ended(10)
    assert lengths.curve("first", "chat").mean == lengths.curve("nobody", "chat").mean

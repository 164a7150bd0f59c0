"""Output lengths: quantiles against numpy's, what is asked when little is known, and forgetting."""

import random

import numpy as np
import pytest

from cluster.scheduler.fleet.output_lengths import OutputLengths


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9, 0.99])
def test_quantiles_are_right_to_a_bucket(share: float) -> None:
    rng, lengths = random.Random(1), OutputLengths()
    seen = [int(rng.lognormvariate(5, 1)) + 1 for _ in range(400)]
    for num_tokens in seen:
        lengths.observe("", "chat", num_tokens)
    exact = float(np.quantile(seen, share))
    found = lengths.quantile("", "chat", share)
    assert found is not None
    assert 0.9 * exact <= found <= 1.35 * exact
    assert lengths.mean("", "chat") == pytest.approx(np.mean(seen), rel=0.1)


def test_little_is_known_of_a_tenant_at_first() -> None:
    lengths = OutputLengths()
    assert lengths.quantile("a", "chat", 0.5) is None
    for _ in range(30):
        lengths.observe("b", "chat", 100)
    assert lengths.quantile("a", "chat", 0.5) == lengths.quantile("b", "chat", 0.5)
    assert lengths.quantile("a", "batch", 0.5) is not None
    for _ in range(30):
        lengths.observe("a", "chat", 1000)
    mine, theirs = lengths.quantile("a", "chat", 0.5), lengths.quantile("b", "chat", 0.5)
    assert mine is not None
    assert theirs is not None
    assert mine > 5 * theirs


def test_what_was_long_ago_is_forgotten() -> None:
    lengths = OutputLengths()
    for num_tokens, times in ((50, 20_000), (2000, 3000)):
        for _ in range(times):
            lengths.observe("", "chat", num_tokens)
    assert (lengths.quantile("", "chat", 0.1) or 0) > 1500
    assert lengths.mean("", "chat") == pytest.approx(2000, rel=0.02)


def test_tenants_that_come_and_go_are_not_kept_for_ever() -> None:
    lengths = OutputLengths()
    for i in range(20_000):
        lengths.observe(f"t{i}", "chat", 10)
    assert len(lengths._of) <= 4097  # pyright: ignore[reportPrivateUsage]

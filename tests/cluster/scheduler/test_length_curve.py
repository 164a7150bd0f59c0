"""Output lengths as a life table: against SciPy's Kaplan-Meier estimate, a textbook's sample, and the posterior mean of a Dirichlet
process."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cluster.scheduler.fleet.length_curve import (
    LengthCounts,
    LengthCurve,
    bucket_of,
    expected_curve,
)
from core.output_marks import MARKS, mark, next_mark
from core.scheduler_tuning import DEFAULT_TUNING as TUNING

stats = pytest.importorskip("scipy.stats")
LENGTHS = [mark(bucket) for bucket in range(4, 40)]
"""One of each bucket, so that nothing is rounded."""
ENDED = st.tuples(st.sampled_from(LENGTHS[::2]), st.just(True))
RUNNING = st.tuples(st.sampled_from(LENGTHS[1::2]), st.just(False))
"""In other buckets, where it makes no difference that each counts as half an output in its own."""
OUTPUTS = st.lists(ENDED | RUNNING, min_size=1, max_size=40)


def estimate(outputs: list[tuple[int, bool]], num_expected: float) -> LengthCurve:
    """`outputs` are (tokens, whether it has ended). All have begun before any goes on, so that all count alike."""
    counts = LengthCounts(TUNING.length_decay)
    for _ in outputs:
        counts.enter(0, -1)
    for num_tokens, has_ended in outputs:
        counts.enter(bucket_of(num_tokens), 0)
        if has_ended:
            counts.end(bucket_of(num_tokens), num_tokens)
    return counts.curve(expected_curve(256, TUNING.length_shape), num_expected)


@given(OUTPUTS)
def test_what_still_runs_counts_as_kaplan_and_meier_count_it(outputs: list[tuple[int, bool]]) -> None:
    assume(any(has_ended for _, has_ended in outputs))
    lengths, running = zip(*((num_tokens, not has_ended) for num_tokens, has_ended in outputs), strict=True)
    longer = stats.ecdf(stats.CensoredData.right_censored(lengths, running)).sf.evaluate
    curve = estimate(outputs, 0.0)
    for num_tokens in LENGTHS:
        if num_tokens < max(lengths):
            assert curve.reach[bucket_of(num_tokens) + 1] == pytest.approx(longer(num_tokens), abs=1e-3)


def test_a_sample_from_a_textbook_has_the_textbooks_curve() -> None:
    """21 patients' weeks of remission (Freireich, 1963), of whom 12 were lost from sight. Each number of weeks stands for a bucket
    here, and being lost in a week for the next one."""
    ended, lost = (6, 6, 6, 7, 10, 13, 16, 22, 23), (6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35)
    order = sorted({(week, 0) for week in ended} | {(week, 1) for week in lost})
    length = {week: LENGTHS[place] for place, week in enumerate(order)}
    outputs = [(length[week, 0], True) for week in ended] + [(length[week, 1], False) for week in lost]
    curve = estimate(outputs, 0.0)
    found = {week: round(curve.reach[bucket_of(length[week, 0]) + 1], 3) for week in dict.fromkeys(ended)}
    assert found == {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}


@given(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=40), st.floats(0.5, 50))
def test_what_was_expected_counts_as_so_many_outputs(lengths: list[int], num_expected: float) -> None:
    """The posterior mean of a Dirichlet process is that of the expected outputs and the seen ones together."""
    curve = estimate([(one, True) for one in lengths], num_expected)
    weight = num_expected * 0.998 ** len(lengths)
    mean = (weight * expected_curve(256, TUNING.length_shape).mean + sum(lengths)) / (weight + len(lengths))
    assert curve.mean == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize("mean_tokens", [64, 256, 4096])
def test_nothing_seen_leaves_what_was_expected(mean_tokens: int) -> None:
    expected = expected_curve(mean_tokens, TUNING.length_shape)
    assert expected.mean == pytest.approx(mean_tokens, rel=0.03)
    assert LengthCounts(TUNING.length_decay).curve(expected, 8).mean == pytest.approx(expected.mean)
    log_logistic = stats.fisk(c=2.5)
    for share in (0.05, 0.25, 0.75, 0.95):
        exact = log_logistic.ppf(share) / log_logistic.mean() * mean_tokens
        assert expected.quantile(share) == pytest.approx(exact, rel=0.25)


@given(OUTPUTS)
def test_a_curve_is_a_distribution(outputs: list[tuple[int, bool]]) -> None:
    curve = estimate(outputs, 4.0)
    ends = [reach * hazard for reach, hazard in zip(curve.reach, curve.hazards, strict=True)]
    assert min(ends) >= 0
    assert sum(ends) == pytest.approx(1)
    quantiles = [curve.quantile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)]
    assert quantiles == sorted(quantiles)


def test_marks_are_where_buckets_begin() -> None:
    """A mark says that an output is in a bucket, no sooner and no later."""
    assert [mark(bucket_of(length)) for length in MARKS[:-1]] == list(MARKS[:-1])
    assert [bucket_of(length) for length in MARKS[1:20]] == [bucket_of(length) + 1 for length in MARKS[:19]]
    assert next_mark(0) == MARKS[0]
    assert all(next_mark(mark - 1) == mark < next_mark(mark) for mark in MARKS)

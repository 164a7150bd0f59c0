"""Over any stretch of time nobody gets more than a burst and what was refilled; and whoever waits as told gets in."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.ingress.tenants.tenant_limits import Excess, Meter, TenantLimits, go_duration

steps = st.lists(
    st.tuples(st.floats(0, 20, allow_nan=False), st.integers(1, 40), st.integers(0, 60)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_requests_in_any_window_stay_below_burst_and_refill(events: list[tuple[float, int, int]]) -> None:
    meter, now, let_in = Meter(TenantLimits(requests_per_min=30), 0.0), 0.0, list[float]()
    for gap_s, _, _ in events:
        now += gap_s
        if meter.request(now) is None:
            let_in.append(now)
    for i, first in enumerate(let_in):
        for count, last in enumerate(let_in[i:], start=1):
            assert count <= 30 + (last - first) * 30 / 60 + 1e-6


@settings(max_examples=200, deadline=None)
@given(steps)
def test_tokens_spent_exceed_what_was_refilled_only_by_what_was_running(
    events: list[tuple[float, int, int]],
) -> None:
    meter, now, spent, largest = Meter(TenantLimits(tokens_per_min=100), 0.0), 0.0, 0, 0
    for gap_s, num_prompt, num_output in events:
        now += gap_s
        if meter.begin(1, num_prompt, now) is None:
            meter.spend(num_output, now)
            meter.end(1)
            spent, largest = spent + num_prompt + num_output, max(largest, num_output)
    assert spent <= 100 + now * 100 / 60 + largest + 1e-6


@settings(max_examples=200, deadline=None)
@given(steps)
def test_who_comes_back_as_told_is_let_in(events: list[tuple[float, int, int]]) -> None:
    meter, now = Meter(TenantLimits(requests_per_min=20, tokens_per_min=100), 0.0), 0.0
    for gap_s, num_prompt, num_output in events:
        now += gap_s
        for _ in range(4):
            excess = meter.request(now) or meter.begin(1, num_prompt, now)
            if excess is None:
                meter.spend(num_output, now)
                meter.end(1)
                break
            assert math.isfinite(excess.retry_after_s)
            now += excess.retry_after_s + 1e-6
        else:
            raise AssertionError("refused again and again")


def test_sequences_at_once() -> None:
    meter = Meter(TenantLimits(concurrent=3), 0.0)
    assert meter.begin(2, 10, 0.0) is None
    assert meter.begin(2, 10, 0.0) == Excess("3 sequences at once are allowed and 2 are running", 1.0)
    assert meter.begin(4, 10, 0.0) == Excess("3 sequences at once are allowed and 2 are running", math.inf)
    meter.end(2)
    assert meter.begin(3, 10, 0.0) is None


def test_what_never_fits_is_told_apart() -> None:
    excess = Meter(TenantLimits(tokens_per_min=100), 0.0).begin(1, 101, 0.0)
    assert excess is not None
    assert excess.retry_after_s == math.inf


def test_changed_limits_keep_what_runs() -> None:
    meter = Meter(TenantLimits(requests_per_min=1, concurrent=2), 0.0)
    assert meter.begin(2, 1, 0.0) is None
    assert meter.request(0.0) is None
    meter.change(TenantLimits(requests_per_min=1, concurrent=2, tokens_per_min=5), 1.0)
    assert meter.request(1.0) is not None, "an unchanged bucket keeps its level"
    assert meter.begin(1, 1, 1.0) is not None
    meter.change(TenantLimits(requests_per_min=2), 1.0)
    assert meter.request(1.0) is None


def test_balances_and_durations_as_openai_writes_them() -> None:
    meter = Meter(TenantLimits(requests_per_min=60, tokens_per_min=600), 0.0)
    meter.request(0.0)
    meter.begin(1, 300, 0.0)
    requests, tokens = meter.balances(0.0)
    assert (requests.limit, requests.remaining, go_duration(requests.reset_s)) == (60, 59, "1s")
    assert (tokens.limit, tokens.remaining, go_duration(tokens.reset_s)) == (600, 300, "30s")
    assert [go_duration(s) for s in (0.0, 0.12, 59.2, 90, 360)] == ["0ms", "120ms", "1m0s", "1m30s", "6m0s"]

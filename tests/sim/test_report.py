"""Requests that wait and that decode, against counting at every moment."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from sim.outcome_report import ServedRequest, crowd

_times = st.integers(0, 20).map(float)
_served = st.builds(
    lambda at, first, rest, fate: ServedRequest(
        at, inf if fate == 0 else first, first + rest if fate == 2 else inf, 5
    ),
    _times,
    _times,
    _times,
    st.integers(0, 2),
)


@given(st.lists(_served, max_size=30))
def test_the_crowd_is_counted_at_every_moment(served: list[ServedRequest]) -> None:
    steps = crowd(served)
    assert [step[0] for step in steps] == sorted(step[0] for step in steps)
    for moment in range(60):
        _, waiting, decoding = [step for step in steps if step[0] <= moment + 0.5][-1]
        assert waiting == sum(s.ttft_s < inf and s.at < moment + 0.5 < s.at + s.ttft_s for s in served)
        assert decoding == sum(
            s.e2e_s < inf and s.at + s.ttft_s < moment + 0.5 < s.at + s.e2e_s for s in served
        )

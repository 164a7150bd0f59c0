"""Bisection finds the knee, and several targets share its runs."""

import pytest

from benchmarks.goodput.search import Curve, highest


@pytest.mark.parametrize("knee", [0.3, 1.0, 7.7])
def test_the_knee_is_found_from_either_side(knee: float) -> None:
    for draft in (knee / 5, knee * 4):
        found = highest(lambda copies: 1.0 if copies <= knee else 0.5, 0.9, draft)
        assert knee / 1.1 < found <= knee


def test_two_targets_share_their_runs() -> None:
    asked: list[float] = []

    def measure(copies: float) -> float:
        asked.append(copies)
        return 1.0 - copies / 10

    curve = Curve(measure)
    assert highest(curve, 0.9, 1.0) == pytest.approx(1.0, rel=0.08)
    assert highest(curve, 0.8, 1.0) == pytest.approx(2.0, rel=0.08)
    assert len(asked) == len(set(asked)) == len(curve.points)

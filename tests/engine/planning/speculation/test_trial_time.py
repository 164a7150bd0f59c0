"""Trials of draft tokens take a small share of all time, whatever one takes."""

import pytest

from engine.planning.speculation.trial_time import TrialTime


@pytest.mark.parametrize("lost_s", [0.001, 0.1, 7.0])
def test_there_is_no_other_trial_until_a_hundred_times_what_one_has_lost_has_passed(lost_s: float) -> None:
    trials = TrialTime()
    assert trials.is_paid
    trials.lost(lost_s)
    for _ in range(99):
        trials.passed(lost_s)
        assert not trials.is_paid
    trials.passed(1.01 * lost_s)
    assert trials.is_paid


def test_what_a_trial_has_gained_makes_up_for_its_loss_and_is_not_saved() -> None:
    trials = TrialTime()
    trials.lost(0.3)
    trials.lost(-0.3)
    assert trials.is_paid, "the step behind it was that much shorter"
    trials.lost(-5.0)
    trials.lost(0.1)
    assert not trials.is_paid

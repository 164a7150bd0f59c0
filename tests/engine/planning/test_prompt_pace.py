"""What an instance says of its pace is not one unlucky step's, and not yesterday's."""

from engine.planning.prompt_pace import PromptPace


def test_one_step_that_was_held_up_decides_nothing() -> None:
    pace = PromptPace()
    for now, rate in enumerate((8000.0, 8100.0, 20.0, 7900.0, 8000.0)):
        pace.note(now, rate)
    assert pace.tokens_per_s(5.0) == 8000.0


def test_who_was_slow_at_first_is_tried_again() -> None:
    pace = PromptPace()
    assert pace.tokens_per_s(0.0) == 0.0
    pace.note(0.0, 20.0)
    assert pace.tokens_per_s(1.0) == 20.0
    assert pace.tokens_per_s(60.0) == 0.0
    for now in (61, 62, 63):
        pace.note(now, 8000.0)
    assert pace.tokens_per_s(64.0) == 8000.0

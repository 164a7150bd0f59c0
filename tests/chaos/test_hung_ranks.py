"""A rank that hangs is noticed within a bound, its instance ends, and its streams go on elsewhere with the tokens that are due."""

from pathlib import Path

import pytest

from tests.chaos.hung_ranks import FAULTS, GROUPS, TIMEOUT_S, Group, try_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAUSE_S = TIMEOUT_S + 60.0
"""Until it is noticed, also in a first step of its kind, and what placing and computing anew may take beside other tests."""
IN_TURN = [(0, "stopped"), (1, "hung in a step")]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("group", "role", "cases"),
    [
        *(
            pytest.param(GROUPS[0], "decode", [(0, fault), (1, fault)], id=f"tp2 decodes, {fault}")
            for fault in FAULTS
        ),
        pytest.param(GROUPS[2], "decode", IN_TURN, id="ep2 decodes"),
        pytest.param(GROUPS[3], "decode", IN_TURN, id="dp2 decodes"),
    ],
)
async def test_no_token_is_lost_with_a_rank_that_hangs(
    group: Group, role: str, cases: list[tuple[int, str]], tmp_path: Path
) -> None:
    outcomes = await try_ranks(group, role, cases, tmp_path)
    assert len(outcomes) == len(cases)
    for outcome in outcomes:
        assert outcome.right, outcome
        assert outcome.pause_s < PAUSE_S, outcome
        if outcome.fault != "hung in a step":
            assert f"rank {outcome.rank} of 2" in outcome.why
            assert f"sent nothing for {TIMEOUT_S:g} s" in outcome.why

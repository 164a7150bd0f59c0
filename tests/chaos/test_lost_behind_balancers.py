"""Clients behind each load balancer have every token once while ingresses are killed, as `lost_behind_balancers.py` shows for
longer."""

from pathlib import Path

import pytest

from tests.chaos.lost_behind_balancers import WHOLE, harmless, run
from tests.deploy.balancers import BALANCERS, missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.turns(2)]


@pytest.mark.parametrize("kind", BALANCERS)
async def test_every_token_comes_once_through_a_balancer_while_ingresses_are_killed(
    tmp_path: Path, kind: str
) -> None:
    if reason := missing(kind):
        pytest.skip(reason)
    found = await run(tmp_path, kind, streams=8, seconds=8.0, every_s=2.0, num_tokens=40)
    assert found["killed"] >= 1
    assert all(found.get(way, 0) >= 1 for way in WHOLE), found
    assert all(harmless(what) for what in found if what.startswith("plain")), found

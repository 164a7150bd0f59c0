"""Limits and the ledger hold while an ingress, a scheduler and the database are lost, as `lost_limits.py` shows for longer."""

from pathlib import Path

import pytest

from tests.chaos.databases import new_database
from tests.chaos.lost_limits import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.turns(2)]


@pytest.mark.parametrize("postgres", [False, True])
async def test_four_ingresses_grant_what_is_allowed_and_the_ledger_has_what_clients_count(
    tmp_path: Path, *, postgres: bool
) -> None:
    """An idle tenant may use its minute at once, and this is over within one."""
    with new_database(tmp_path, postgres=postgres) as database:
        found = await run(
            tmp_path, database, requests=20, tokens=1200, seconds=20.0, kill_at_s=3.0, pauses_s=(0.2, 0.2)
        )
    assert len(found["killed"]) == 2
    for tenant in found["tenants"].values():
        assert tenant["clients_counted"][0]
        assert tenant["ledger"] == tenant["clients_counted"]
        assert tenant["granted"] <= 1.05 * tenant["limit_per_min"]
    stored = found["store"]
    assert stored["responses_stored"]
    assert not stored["responses_lost"]
    assert stored["batch_lines_answered_once"] == stored["batch_lines"]

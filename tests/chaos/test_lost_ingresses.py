"""Clients of ingresses that are killed have every token once, as `tests/chaos/lost_ingresses.py` shows for longer."""

from pathlib import Path

import pytest

from tests.chaos.lost_ingresses import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.turns(2)]


@pytest.mark.parametrize("with_decode", [False, True])
async def test_every_token_comes_once_while_ingresses_are_killed(tmp_path: Path, with_decode: bool) -> None:
    found = await run(
        tmp_path / "world", streams=8, seconds=8.0, every_s=2.0, num_tokens=60, with_decode=with_decode
    )
    assert found["killed"] >= 1
    assert found["resumed"] >= 1
    assert found["answers"] >= 8

"""Every state of the hand-over x every fault, with real processes: the clients' tokens equal the undisturbed run, and nothing is left."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.cases import FAULTS, KINDS, MESSAGES, STATES, Outcome
from tests.chaos.matrix import part, run_all
from tests.chaos.node import REQUEST_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENTRIES = part()
_DAYS = 3
NUM_WORLDS = 5
"""Most of a case is waiting until a silent process is given up."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """All cases that were asked for, run at once."""
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if hasattr(item, "callspec") and "name" in item.callspec.params
    }
    folder: Path = tmp_path_factory.mktemp("chaos")
    return asyncio.run(run_all(folder, [entry for entry in ENTRIES if entry.name in wanted], NUM_WORLDS))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(entry.name, marks=pytest.mark.turns(_DAYS, number=entry.turn), id=entry.name)
        for entry in ENTRIES
    ],
)
def test_nobody_notices(results: dict[str, Outcome | Exception], name: str) -> None:
    result = results[name]
    if isinstance(result, Exception):
        raise result
    assert result.recovery_s < REQUEST_TIMEOUT_S / 2


def test_each_day_has_every_state_fault_message_and_mistreatment_over_shared_memory() -> None:
    for day in range(_DAYS):
        whats = [e.what for e in ENTRIES if e.setting == "shm" and e.turn % _DAYS == day]
        struck = [tuple(what.split(" in ")) for what in whats if " in " in what]
        mistreated = [tuple(what.split()) for what in whats if " in " not in what]
        assert {fault for fault, _ in struck} == {*FAULTS}
        assert {state for _, state in struck} == {*STATES} - {"decode.RECALLING"}
        assert {kind for kind, _ in mistreated} >= {*KINDS}
        assert {message for _, message in mistreated} >= {*MESSAGES}

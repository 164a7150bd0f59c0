"""Every state of the hand-over x every fault, with real processes: the clients' tokens equal the undisturbed run, and nothing is left."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.cases import Outcome
from tests.chaos.matrix import part, run_all
from tests.chaos.node import REQUEST_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENTRIES = part()
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


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES])
def test_nobody_notices(results: dict[str, Outcome | Exception], name: str) -> None:
    result = results[name]
    if isinstance(result, Exception):
        raise result
    assert result.recovery_s < REQUEST_TIMEOUT_S / 2

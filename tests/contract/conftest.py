"""Fixtures of the transport suites."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract.device_pools import DEVICE
from tests.contract.transports import DRIVERS, REMOTE, Holder


@pytest.fixture(params=["loopback", "loopback on a device", "shm", *REMOTE])
async def holder(request: pytest.FixtureRequest) -> AsyncIterator[Holder]:
    made = Holder(request.param)
    yield made
    await made.inbox.shut()


@pytest.fixture(autouse=True)
def ordered() -> Iterator[None]:
    """Nothing that a test has done on the simulated device was left to chance."""
    yield
    found, DEVICE.violations[:] = list(DEVICE.violations), []
    assert not found


@pytest.fixture(autouse=True)
def fake_memory() -> Iterator[None]:
    yield
    for driver in DRIVERS.values():
        driver.runtime.free_all()
    DRIVERS.clear()
    for path in Path("/dev/shm").glob("fake-cuda-*"):  # of writers that were killed
        if not Path(f"/proc/{path.name.split('-')[2]}").exists():
            path.unlink(missing_ok=True)

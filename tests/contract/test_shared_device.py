"""Memory of a simulated device that several processes have: what one writes the others read, and what no host has waited for is found.

Devices of one process stand for those of several: they share nothing but the handle."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.errors import Bug, DeviceError
from device.poller import Poller
from device.seam import Copy, Event, Region
from device.simulated import SimulatedDevice

NUM_BYTES = 1 << 12


@pytest.fixture
def devices() -> Iterator[tuple[SimulatedDevice, SimulatedDevice]]:
    """The owner's and another one."""
    made = SimulatedDevice(seed=7), SimulatedDevice(seed=8)
    yield made
    for device in made:
        device.close()


def shared(devices: tuple[SimulatedDevice, SimulatedDevice]) -> tuple[Region, Region]:
    """One and the same memory, as the owner and as the other one name it."""
    owner, other = devices
    whole = owner.allocate(NUM_BYTES + 256)
    handle, offset = owner.export(whole.part(256, NUM_BYTES))
    assert len(handle) == 64
    return whole.part(256, NUM_BYTES), other.open(handle, offset + NUM_BYTES).part(offset, NUM_BYTES)


def written(device: SimulatedDevice, region: Region, content: bytes) -> Event:
    stream, pinned = device.stream("write"), device.pinned(len(content))
    device.host_view(pinned, write=True)[:] = content
    stream.copy([Copy(region, pinned)])
    return stream.record()


def read(device: SimulatedDevice, region: Region) -> bytes:
    stream, pinned = device.stream("read"), device.pinned(region.num_bytes)
    stream.copy([Copy(pinned, region)])
    Poller().wait([stream.record()])
    return bytes(device.host_view(pinned, write=False))


def test_what_one_process_writes_another_reads_once_a_host_has_seen_it_done(
    devices: tuple[SimulatedDevice, SimulatedDevice],
) -> None:
    here, there = shared(devices)
    for content in (os.urandom(NUM_BYTES), os.urandom(NUM_BYTES)):
        Poller().wait([written(devices[0], here, content)])
        assert read(devices[1], there) == content
    back = os.urandom(NUM_BYTES)
    Poller().wait([written(devices[1], there, back)])
    assert read(devices[0], here) == back
    assert not devices[0].violations
    assert not devices[1].violations


def read_too_soon(devices: tuple[SimulatedDevice, SimulatedDevice], here: Region, there: Region) -> None:
    written(devices[0], here, bytes(NUM_BYTES))
    read(devices[1], there)


def overwritten_while_it_is_read(
    devices: tuple[SimulatedDevice, SimulatedDevice], here: Region, there: Region
) -> None:
    devices[1].stream("read").copy([Copy(devices[1].pinned(NUM_BYTES), there)])
    written(devices[0], here, bytes(NUM_BYTES))


def computed_on_before_it_is_there(
    devices: tuple[SimulatedDevice, SimulatedDevice], here: Region, there: Region
) -> None:
    written(devices[1], there, bytes(NUM_BYTES))
    devices[0].compute.uses([here.part(NUM_BYTES - 4, 4)], [])


@pytest.mark.parametrize(
    "race", [read_too_soon, overwritten_while_it_is_read, computed_on_before_it_is_there]
)
def test_what_no_host_has_waited_for_is_found_between_processes(
    devices: tuple[SimulatedDevice, SimulatedDevice],
    race: Callable[[tuple[SimulatedDevice, SimulatedDevice], Region, Region], None],
) -> None:
    here, there = shared(devices)
    for device in devices:
        device.held().__enter__()
    with pytest.raises(Bug, match="nothing orders that behind another process"):
        race(devices, here, there)


def test_marks_from_before_the_sharing_count(devices: tuple[SimulatedDevice, SimulatedDevice]) -> None:
    owner, other = devices
    whole = owner.allocate(NUM_BYTES)
    owner.compute.uses([], [whole])
    handle, _ = owner.export(whole)
    with pytest.raises(Bug, match="nothing orders that"):
        read(other, other.open(handle, NUM_BYTES))


def test_what_cannot_be_shared_or_opened_is_refused(
    devices: tuple[SimulatedDevice, SimulatedDevice],
) -> None:
    owner, other = devices
    here, there = shared(devices)
    seen = owner.allocate(64)
    owner.array(seen)
    for region in (Region(0, 4096, 4), owner.pinned(4)):
        with pytest.raises(DeviceError, match="allocated here"):
            owner.export(region)
    with pytest.raises(DeviceError, match="before somebody has it"):
        owner.export(seen)
    with pytest.raises(DeviceError, match="allocated here"):
        other.export(there)
    with pytest.raises(DeviceError, match="64 bytes, not 5"):
        other.open(b"short", 4)
    with pytest.raises(DeviceError, match="no simulated memory"):
        other.open(b"1:2:3".ljust(64, b"\0"), 4)
    with pytest.raises(DeviceError, match="not 100000"):
        other.open(owner.export(here)[0], 100_000)
    with pytest.raises(DeviceError, match="no other process's memory"):
        owner.shut(seen)
    with pytest.raises(DeviceError, match="no allocation"):
        other.free(there)


CHILD = """
import sys
from device.simulated import SimulatedDevice
device = SimulatedDevice()
region = device.open(bytes.fromhex(sys.argv[1]), {num_bytes})
device.compute.uses([], [region])
device.array(region)[:] = 7
print("there", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_keeps_nothing_from_the_others(
    devices: tuple[SimulatedDevice, SimulatedDevice],
) -> None:
    """What its host has not waited for stays unordered."""
    owner, _ = devices
    whole = owner.allocate(NUM_BYTES)
    handle, _ = owner.export(whole)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(num_bytes=NUM_BYTES), handle.hex()],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    mapped = Path(f"/proc/{child.pid}/maps").read_text()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    with pytest.raises(Bug, match="behind another process"):
        read(owner, whole)
    assert "/memfd:baton-simulated-memory" in mapped
    assert "/dev/shm/" not in mapped, "a file there outlives whoever has made it"

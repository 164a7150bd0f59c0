"""Each wait that keeps a pool on a device whole is broken on purpose: without it, what it orders is found to be unordered."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from core.errors import BatonError
from device.poller import Poller, Then
from device.port import HostPort, PoolMemory
from device.ring import PinnedRing, Slot
from device.seam import Copy, Event
from device.simulated import SimulatedDevice, SimulatedStream
from engine.execution.step_memory import Pack, StepMemory
from kvtransfer.copies import CopyRun
from kvtransfer.source import DeviceSource
from kvtransfer.transport.loopback_transport import (
    DeviceLoopbackReceiver,
    DeviceLoopbackSender,
    LoopbackFabric,
)
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity
from tests.contract.transports import BLOCKS, KEY, SHARD, WRITER
from tests.models.checkpoints import CPU
from tests.patience import until

NUM_BYTES = 1 << 13
SLOT_BYTES = 1 << 10


class Deaf(SimulatedDevice):
    """Streams of one name wait for no event."""

    def __init__(self, deaf: str = "") -> None:
        super().__init__(seed=3)
        self._deaf = deaf
        if deaf == "compute":
            self.compute.wait = _not_waiting

    def stream(self, name: str) -> SimulatedStream:
        made = super().stream(name)
        if name == self._deaf:
            made.wait = _not_waiting
        return made


def _not_waiting(event: Event) -> None:
    """What a forgotten wait does."""


class Impatient(Poller):
    """Takes all work for done as soon as it is given."""

    def when_done(self, event: Event, then: Then) -> None:
        then(None)


@pytest.fixture
def devices() -> Iterator[list[SimulatedDevice]]:
    made: list[SimulatedDevice] = []
    yield made
    for device in made:
        device.close()


def compute(memory: PoolMemory) -> None:
    """A layer's work on the pool, which comes behind what it must wait for."""
    memory.order(memory.device.compute)
    memory.device.compute.uses([], [memory.region])


class Taken:
    """A Sender that reads what is staged for it."""

    name, vouches = "taken", False

    async def write(self, grant_id: str, region: object, runs: Sequence[CopyRun]) -> None:
        """Take it all."""


async def send(memory: PoolMemory) -> None:
    """A layer is staged for a sender of host memory while it is computed."""
    compute(memory)
    source = DeviceSource(memory, PinnedRing(memory.device, SLOT_BYTES, 2))
    try:
        await source.write(Taken(), "g", None, [CopyRun(0, 0, NUM_BYTES)], source.mark())  # type: ignore[arg-type]
    finally:
        await source.close()


async def receive(memory: PoolMemory) -> None:
    """A connection fills slots again and again."""
    port = HostPort(memory, "receive", SLOT_BYTES)

    def fill(slot: Slot, part: Sequence[tuple[int, int]]) -> None:
        slot.pieces([size for _, size in part], write=True)

    port.write([(0, NUM_BYTES)], fill)
    port.close()


async def save(memory: PoolMemory) -> None:
    """A block is read for a lower tier, nobody waits, and a step computes over it."""
    stream = memory.device.stream("save")
    stream.copy([Copy(memory.device.pinned(NUM_BYTES), memory.region)])
    memory.read_until(stream.record())
    compute(memory)
    await memory.poller.done([memory.device.compute.record()])


async def refill(memory: PoolMemory) -> None:
    """As `save`, and somebody else's bytes come into the block."""
    stream = memory.device.stream("save")
    stream.copy([Copy(memory.device.pinned(NUM_BYTES), memory.region)])
    memory.read_until(stream.record())
    await receive(memory)


async def hand_over(memory: PoolMemory) -> None:
    """Within a process: from pool to pool, as soon as a layer is computed."""
    device = memory.device
    there = PoolMemory(device, device.allocate(NUM_BYTES), memory.poller)
    fabric = LoopbackFabric()
    admission = WriteAdmission(lambda *_: True, lambda *_: None, lambda _: None)
    receiver = DeviceLoopbackReceiver(fabric, "holder", there, admission)
    compute(memory)
    source = DeviceSource(memory, PinnedRing(device, SLOT_BYTES, 1), ("loopback",))
    runs = [CopyRun(0, 0, NUM_BYTES)]
    try:
        sender = DeviceLoopbackSender(fabric, memory)
        await source.write(sender, "g", receiver.region(SHARD, BLOCKS), runs, source.mark())
    finally:
        await receiver.close()
        await source.close()


async def steps(memory: PoolMemory) -> None:
    """Each step adds one to what the step before has drawn, and the host reads it when the step is over."""
    between = StepMemory(memory.device, CPU, 4)
    for number in range(4):
        io, pack = between.begin(), Pack()
        ones, places = pack.add(np.ones(4, np.int64)), pack.add(np.array([io.place(row) for row in range(4)]))
        pack.send(io.upload)
        before = io.known((places() + 4) % 8) if number else 0
        io.give([before + ones()])
        memory.poller.wait([io.end()])
        assert io.read() == [[number + 1] * 4]
    between.close()


WAITS = [
    pytest.param(send, "send", Poller, id="staging waits for the layer"),
    pytest.param(send, "", Impatient, id="senders wait for the staging"),
    pytest.param(receive, "", Impatient, id="slots are filled again behind their copies"),
    pytest.param(save, "compute", Poller, id="steps wait for blocks that are being saved"),
    pytest.param(refill, "receive", Poller, id="arriving bytes wait for blocks that are being saved"),
    pytest.param(hand_over, "", Impatient, id="device memory is read behind the layer"),
    pytest.param(steps, "compute", Poller, id="steps wait for their inputs"),
    pytest.param(steps, "step results", Poller, id="what is drawn is copied behind the step"),
    pytest.param(steps, "", Impatient, id="the host reads what is drawn behind its copy"),
]


@pytest.mark.parametrize(("work", "deaf", "poller"), WAITS)
async def test_without_its_wait_work_is_found_unordered(
    work: object, deaf: str, poller: type[Poller], devices: list[SimulatedDevice]
) -> None:
    for name, kind in (("", Poller), (deaf, poller)):
        device = Deaf(name)
        devices.append(device)
        memory = PoolMemory(device, device.allocate(NUM_BYTES), kind())
        with contextlib.suppress(BatonError):
            await work(memory)  # type: ignore[operator]
    whole, broken = devices
    assert not whole.violations
    assert "nothing orders that" in broken.violations[0]


async def test_a_layer_goes_from_device_to_device_while_the_next_one_computes(
    devices: list[SimulatedDevice],
) -> None:
    """Through both rings and TCP between them, with streams that take their time."""
    ends = [SimulatedDevice(seed=seed) for seed in (1, 2)]
    devices.extend(ends)
    here, there = (PoolMemory(end, end.allocate(NUM_BYTES), Poller()) for end in ends)
    got: list[int] = []
    admission = WriteAdmission(lambda *_: True, lambda _, count: got.append(count), lambda _: None)
    receiver = TcpReceiver(KEY, Identity("holder", "h1", os.getpid()), "127.0.0.1", there, admission)
    ring = PinnedRing(here.device, SLOT_BYTES, 3)
    sender = TcpSender(KEY, WRITER, ring.memory, checksum=True)
    source = DeviceSource(here, ring)
    half, content = NUM_BYTES // 2, os.urandom(NUM_BYTES)
    uploads = HostPort(here, "weights", NUM_BYTES)
    uploads.write([(0, NUM_BYTES)], lambda slot, _: _put(slot, content))
    for layer in (0, 1):
        part = here.region.part(layer * half, half)
        here.device.compute.uses([], [part])
        run = CopyRun(layer * half, layer * half, half)
        await source.write(sender, "g", receiver.region(SHARD, BLOCKS), [run], source.mark())
    await until(lambda: sum(got) == NUM_BYTES)
    found = bytearray()
    HostPort(there, "look", NUM_BYTES).read([(0, NUM_BYTES)], found.extend)
    assert found == content
    await sender.close()
    await source.close()
    await receiver.close()
    assert not [end.violations for end in ends if end.violations]


def _put(slot: Slot, content: bytes) -> None:
    (piece,) = slot.pieces([len(content)], write=True)
    piece[:] = content

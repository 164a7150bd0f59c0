"""Each wait that keeps a pool on a device whole is broken on purpose: without it, what it orders is found to be unordered."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from core.errors import BatonError
from core.kv import KVLayout, KVShard
from core.plan import StepPlan
from device.poller import Poller, Then
from device.port import HostPort, PoolMemory
from device.ring import PinnedRing, Slot
from device.seam import Copy, Event
from device.simulated import SimulatedDevice, SimulatedStream
from engine.execution.batch.step_memory import Pack, StepMemory
from engine.execution.pools.resident_pool import ResidentPool
from kvtransfer.copies import CopyRun
from kvtransfer.source import DeviceSource
from kvtransfer.transport.communicator import BUFFER_BYTES, NUM_BUFFERS
from kvtransfer.transport.cuda_ipc import CudaIpcMedium
from kvtransfer.transport.loopback_transport import (
    DeviceLoopbackReceiver,
    DeviceLoopbackSender,
    LoopbackFabric,
)
from kvtransfer.transport.pull import PullReceiver, PullSender
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity
from tests.contract.gloo_group import gloo_medium
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


def _refused(work: object) -> None:
    raise AssertionError("the compute stream is the model's")


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


async def send_computed(memory: PoolMemory) -> None:
    """As `send`, when the layer is there."""
    compute(memory)
    await Poller().done([memory.device.compute.record()])
    source = DeviceSource(memory, PinnedRing(memory.device, SLOT_BYTES, 2))
    try:
        await source.write(Taken(), "g", None, [CopyRun(0, 0, NUM_BYTES)], ())  # type: ignore[arg-type]
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
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=4, dtype="float32")
    shard = KVShard.whole(layout)
    pool = ResidentPool(shard, NUM_BYTES // shard.pool_bytes(1), memory, CPU)
    saved(memory)
    pool.begin(StepPlan(step=0, new=(), copies=(), work=(), drop=()))
    pool.written_in_all(torch.arange(4))
    await memory.poller.done([memory.device.compute.record()])


async def refill(memory: PoolMemory) -> None:
    """As `save`, and somebody else's bytes come into the block."""
    saved(memory)
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


def saved(memory: PoolMemory) -> None:
    """The pool's bytes are being read for a lower tier."""
    stream = memory.device.stream("save")
    stream.copy([Copy(memory.device.pinned(NUM_BYTES), memory.region.part(0, NUM_BYTES))])
    memory.read_until(stream.record())


async def hand_over_to_saved(memory: PoolMemory) -> None:
    """As `refill`, from another pool of the process."""
    device = memory.device
    ours = PoolMemory(device, device.allocate(NUM_BYTES), Poller())
    fabric = LoopbackFabric()
    admission = WriteAdmission(lambda *_: True, lambda *_: None, lambda _: None)
    receiver = DeviceLoopbackReceiver(fabric, "holder", memory, admission)
    saved(memory)
    try:
        sender = DeviceLoopbackSender(fabric, ours)
        await sender.write("g", receiver.region(SHARD, BLOCKS), [CopyRun(0, 0, NUM_BYTES)])
    finally:
        await receiver.close()


async def fetch_to_saved(memory: PoolMemory) -> None:
    """As `refill`, from another process's memory."""
    writer = SimulatedDevice(seed=4)
    ours = PoolMemory(writer, writer.allocate(NUM_BYTES), Poller())
    admission = WriteAdmission(lambda *_: True, lambda *_: None, lambda _: None)
    holder = Identity("holder", "h1", os.getpid())
    receiver = PullReceiver(KEY, holder, "127.0.0.1", CudaIpcMedium(memory.device, memory), admission)  # type: ignore[arg-type]
    sender = PullSender(KEY, WRITER, CudaIpcMedium(writer, ours), checksum=False)
    saved(memory)
    try:
        await sender.write("g", receiver.region(SHARD, BLOCKS), [CopyRun(0, 0, NUM_BYTES)])
    finally:
        await sender.close()
        await receiver.close()
        writer.close()


async def read_behind(memory: PoolMemory) -> None:
    """Somebody wants the bytes as they are behind a layer."""
    compute(memory)
    port = HostPort(memory, "read", SLOT_BYTES)
    port.read([(0, NUM_BYTES)], lambda _: None, [memory.device.compute.record()])
    port.close()


async def undo(memory: PoolMemory) -> None:
    """A step found no memory when part of it was launched, and its blocks are used again when that part is over."""
    between = StepMemory(memory.device, CPU, 4)
    compute(memory)
    memory.poller.wait([between.mark()])
    stream = memory.device.stream("reuse")
    stream.copy([Copy(memory.device.pinned(NUM_BYTES), memory.region)])
    memory.poller.wait([stream.record()])
    stream.close()
    between.close()


async def by_communicator(ours: PoolMemory, theirs: PoolMemory, asked: Poller | None = None) -> None:
    """Two layers go from pool to pool, each through all buffers of both ends of a communicator, and one of them twice. `asked` is
    whom the source asks whether a layer is there."""
    device, half = ours.device, ours.region.num_bytes // 2
    admission = WriteAdmission(lambda *_: True, lambda *_: None, lambda _: None)
    holder = Identity("holder", "h1", os.getpid())
    receiver = PullReceiver(KEY, holder, "127.0.0.1", gloo_medium(theirs), admission)
    sender = PullSender(KEY, WRITER, gloo_medium(ours), checksum=False)
    source = DeviceSource(PoolMemory(device, ours.region, asked or Poller()), None, ("gloo",))
    region = receiver.region(SHARD, BLOCKS)
    try:
        for layer in (0, half):
            device.compute.uses([], [ours.region.part(layer, half)])
            await source.write(sender, "g", region, [CopyRun(layer, layer, half)], source.mark())
    finally:
        await sender.close()
        await source.close()
        await receiver.close()


def pool_beside(memory: PoolMemory, poller: Poller) -> PoolMemory:
    """Another one on the same device, with two layers of as many bytes as a communicator's buffers have, and some more."""
    return PoolMemory(memory.device, memory.device.allocate(2 * (NUM_BUFFERS + 1) * BUFFER_BYTES), poller)


async def send_layers(memory: PoolMemory) -> None:
    await by_communicator(pool_beside(memory, Poller()), pool_beside(memory, Poller()), memory.poller)


async def pass_on(memory: PoolMemory) -> None:
    await by_communicator(pool_beside(memory, memory.poller), pool_beside(memory, Poller()))


async def take_over(memory: PoolMemory) -> None:
    await by_communicator(pool_beside(memory, Poller()), pool_beside(memory, memory.poller))


async def take_over_saved(memory: PoolMemory) -> None:
    """As `refill`, from a communicator's buffers."""
    theirs = pool_beside(memory, Poller())
    saved(theirs)
    await by_communicator(pool_beside(memory, Poller()), theirs)


async def steps(memory: PoolMemory) -> None:
    """Each step adds one to what the step before has sampled, and the host reads it when the step is over."""
    between = StepMemory(memory.device, CPU, 4)
    for number in range(4):
        io, pack = between.begin(), Pack()
        ones, places = pack.add(np.ones(4, np.int64)), pack.add(io.place() + np.arange(4))
        pack.send(io.upload)
        before = io.known((places() + 4) % 8) if number else 0
        io.give([before + ones()])
        memory.poller.wait([io.end()])
        assert io.read() == [[number + 1] * 4]
    between.close()


WAITS = [
    pytest.param(send, "", Impatient, id="staging waits for the layer"),
    pytest.param(send_computed, "", Impatient, id="senders wait for the staging"),
    pytest.param(receive, "", Impatient, id="slots are filled again behind their copies"),
    pytest.param(save, "compute", Poller, id="steps wait for blocks that are being saved"),
    pytest.param(refill, "receive", Poller, id="arriving bytes wait for blocks that are being saved"),
    pytest.param(hand_over, "", Impatient, id="device memory is read behind the layer"),
    pytest.param(
        hand_over_to_saved,
        "loopback",
        Poller,
        id="bytes of this process wait for blocks that are being saved",
    ),
    pytest.param(
        fetch_to_saved, "cuda_ipc", Poller, id="bytes of another process wait for blocks that are being saved"
    ),
    pytest.param(read_behind, "read", Poller, id="bytes are read behind what computes them"),
    pytest.param(
        undo, "step results", Poller, id="what was launched in vain is over before its memory is used again"
    ),
    pytest.param(send_layers, "", Impatient, id="a communicator's copies begin behind the layer"),
    pytest.param(pass_on, "", Impatient, id="a communicator sends behind the copy from the pool"),
    pytest.param(take_over, "", Impatient, id="the pool takes from a communicator behind its receive"),
    pytest.param(take_over_saved, "gloo", Poller, id="received bytes wait for blocks that are being saved"),
    pytest.param(steps, "compute", Poller, id="steps wait for their inputs"),
    pytest.param(steps, "step results", Poller, id="what is sampled is copied behind the step"),
    pytest.param(steps, "", Impatient, id="the host reads what is sampled behind its copy"),
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


async def test_a_communicator_gives_the_compute_stream_no_work(devices: list[SimulatedDevice]) -> None:
    """A step that computes would come behind it, and behind whatever the peer does."""

    class Alone(SimulatedDevice):
        def __init__(self) -> None:
            super().__init__(seed=3)
            self.compute.copy = _refused
            self.compute.wait = _refused

    devices.append(device := Alone())
    memory = PoolMemory(device, device.allocate(NUM_BYTES), Poller())
    await by_communicator(pool_beside(memory, Poller()), pool_beside(memory, Poller()))
    assert not device.violations


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

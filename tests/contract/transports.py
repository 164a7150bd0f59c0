"""What the suites over every KV transport share: a holder, writers of each kind, and what they move."""

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.errors import TransferError
from core.kv import KVLayout, KVShard
from core.messages import Commit, RegionKey
from core.types import TokenOut
from device.cuda import CudaDevice
from device.host_memory import address_of
from device.poller import Poller
from device.port import PoolMemory
from device.ring import PinnedRing
from device.seam import Region
from kvtransfer.copies import CopyRun, Side, as_bytes, at_layer, plan_vectors
from kvtransfer.inbox import Inbox
from kvtransfer.transport.base import Receiver, Sender
from kvtransfer.transport.cuda_ipc import CudaIpcMedium
from kvtransfer.transport.loopback_transport import (
    DeviceLoopbackReceiver,
    DeviceLoopbackSender,
    LoopbackFabric,
    LoopbackReceiver,
    LoopbackSender,
)
from kvtransfer.transport.nixl import NixlMedium, RegisteredMemory, available
from kvtransfer.transport.pull import Medium, PullReceiver, PullSender
from kvtransfer.transport.shm import SharedSegment, ShmReceiver, ShmSender
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity
from tests.contract.cuda_as_cpp import load_launch
from tests.contract.device_pools import DevicePoolView, FromDevice
from tests.contract.fake_cuda import FakeRuntime
from tests.contract.gloo_group import gloo_medium
from tests.contract.watched_medium import WatchedMedium

KEY = b"cluster key"
SHARD = KVShard.whole(KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32"))
BLOCKS = 16
WRITER = Identity("writer", "w1", os.getpid())
needs_nixl = pytest.mark.skipif(not available(), reason="the nixl extra is not installed")


@dataclass
class Holder:
    """The decode side: a pool, an inbox and one receiver."""

    kind: str
    fabric: LoopbackFabric = field(default_factory=LoopbackFabric)
    completed: list[Commit] = field(default_factory=list)
    corrupted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = SHARD.pool_bytes(BLOCKS)
        self.segment = SharedSegment(size) if self.kind == "shm" else None
        self.buffer: Any = self.segment.buffer if self.segment else pool_for(self.kind, size)
        self.inbox = Inbox(
            SHARD,
            BLOCKS,
            "holder",
            "h1",
            on_complete=self.completed.append,
            on_corrupted=self.corrupted.append,
        )
        self.receiver: Any
        if self.segment:
            self.receiver = ShmReceiver(self.segment)
        elif self.kind == "loopback on a device":
            self.receiver = DeviceLoopbackReceiver(
                self.fabric, "holder", self.buffer.memory, self.admission()
            )
        elif self.kind == "loopback":
            self.receiver = LoopbackReceiver(
                self.fabric, "holder", self.buffer, self.inbox.may_write, self.inbox.arrived
            )
        else:
            me = Identity("holder", "h1", os.getpid())
            self.medium = (
                None if self.kind.startswith("tcp") else WatchedMedium(medium(self.kind, self.buffer))
            )
            self.receiver = make_receiver(self.kind, me, self.buffer, self.admission(), self.medium)
        receivers: list[Receiver] = [self.receiver]
        self.inbox.attach(receivers)

    def admission(self) -> WriteAdmission:
        self.admitted = WriteAdmission(self.inbox.may_write, self.inbox.arrived, self.inbox.corrupted)
        return self.admitted

    @property
    def num_refused(self) -> int:
        if self.kind == "shm":
            return 0  # it cannot refuse
        return self.receiver.num_refused if self.kind == "loopback" else self.admitted.num_refused

    def grant(self, blocks: list[int], key: str = "r#0", epoch: int = 0, num_tokens: int | None = None):
        return self.inbox.open(
            key, epoch, "writer", blocks, first_token=0, num_tokens=num_tokens or 4 * len(blocks), ttl_s=60
        )

    def block(self, layer: int, block: int) -> bytes:
        start = (layer * BLOCKS + block) * SHARD.block_bytes
        return bytes(self.buffer[start : start + SHARD.block_bytes])


DRIVERS: dict[int, CudaDevice] = {}
"""Devices with fake memory, by its address."""


def pool_for(kind: str, num_bytes: int) -> Any:
    if kind.endswith("on a device"):
        return DevicePoolView(num_bytes)
    if kind != "cuda_ipc":
        return memoryview(bytearray(num_bytes))
    runtime = FakeRuntime()
    device = CudaDevice(0, runtime, load_launch)
    address = device.allocate(num_bytes + 64).address
    DRIVERS[address + 64] = device
    return runtime.view(address)[64:]


def medium(kind: str, pool: Any) -> Medium:
    match kind:
        case "cuda_ipc":
            address = address_of(pool)
            device = DRIVERS[address]
            return CudaIpcMedium(device, PoolMemory(device, Region(0, address, len(pool)), Poller()))
        case "nixl":
            return NixlMedium(RegisteredMemory.of(pool))
        case "gloo on a device":
            return gloo_medium(pool.memory)
        case _:
            raise AssertionError(kind)


def source_for(kind: str, content: bytes) -> Any:
    source = pool_for(kind, len(content))
    source[:] = content
    return source


def make_receiver(
    kind: str, me: Identity, pool: Any, admission: WriteAdmission, through: Medium | None = None
) -> Receiver:
    """`through`: what the holder fetches by, where it does. None: a medium of that kind."""
    if kind == "tcp on a device":
        return TcpReceiver(KEY, me, "127.0.0.1", pool.memory, admission)
    if kind == "tcp":
        return TcpReceiver(KEY, me, "127.0.0.1", pool, admission)
    return PullReceiver(KEY, me, "127.0.0.1", through or medium(kind, pool), admission)


def make_sender(
    kind: str, fabric: LoopbackFabric, source: Any, checksum: bool = False, me: Identity = WRITER
) -> Sender:
    match kind:
        case "loopback on a device":
            inner = DeviceLoopbackSender(fabric, source.memory)
            return FromDevice(inner, source.memory, PinnedRing(source.memory.device, 1 << 10, 2), direct=True)
        case "tcp on a device" | "shm from a device":
            ring = PinnedRing(source.memory.device, 1 << 10, 3)
            plain = kind.split()[0]
            return FromDevice(make_sender(plain, fabric, ring.memory, checksum, me), source.memory, ring)
        case "gloo on a device":
            inner = PullSender(KEY, me, medium(kind, source), checksum=checksum)
            return FromDevice(inner, source.memory, PinnedRing(source.memory.device, 1 << 10, 2), direct=True)
        case "loopback":
            return LoopbackSender(fabric, source)
        case "shm":
            return ShmSender(source, checksum=checksum)
        case "tcp":
            return TcpSender(KEY, me, source, checksum=checksum)
        case _:
            return PullSender(KEY, me, medium(kind, source), checksum=checksum)


PULLED = [pytest.param("nixl", marks=needs_nixl), "gloo on a device", "cuda_ipc"]
IN_HOST_MEMORY = PULLED[:1]
REMOTE = ["tcp", "tcp on a device", *PULLED]


def runs_for(blocks: list[int], source_blocks: list[int]) -> list[CopyRun]:
    a, b = (
        Side(shard=SHARD, num_blocks=BLOCKS, block_ids=source_blocks),
        Side(shard=SHARD, num_blocks=BLOCKS, block_ids=blocks),
    )
    planned = plan_vectors(a, b, 0, 4 * len(blocks))
    return [run for layer in range(2) for run in as_bytes(at_layer(planned, a, b, layer), a, b)]


async def write_or_refused(sender: Sender, grant_id: str, region: RegionKey, runs: list[CopyRun]) -> None:
    """Whether the writer hears of a refusal is the transport's business."""
    with contextlib.suppress(TransferError):
        await sender.write(grant_id, region, runs)


def commit(grant_id: str, num_bytes: int) -> Commit:
    return Commit(
        grant_id=grant_id,
        num_chunks=1,
        num_bytes=num_bytes,
        first=TokenOut(request_id="r", attempt=0, index=0, token=5),
    )

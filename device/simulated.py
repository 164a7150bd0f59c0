"""A device whose memory is apart from the host's and whose streams are threads that take their time: to find, without a GPU, what
nobody has ordered.

Each access is judged by `device/happens_before.py`. What is not ordered raises Bug where the work is given, and is kept in
`violations`, since whoever gave it may take the Bug for a failed transfer. What the host puts on `compute` it does itself, at
once, as torch on processors does: so it declares with `uses` what it touches, and waiting there holds it up."""

import itertools
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from core.errors import Bug, DeviceError, OutOfMemory
from device.convert import convert_regions
from device.happens_before import AccessLog, VectorClock
from device.seam import HOST, Conversion, Copy, Event, Region
from device.shared_accesses import HANDLE_BYTES, SharedLog, open_shared, share

_MAX_DELAY_S = 300e-6
_FIRST_ADDRESS = 1 << 56
"""No processor has memory there: the host that takes an address of the device for its own ends at once."""
_GAP = 1 << 32
_ACTORS = itertools.count()
"""Numbers of streams and hosts in this process. With the process's own, no two anywhere are alike."""


@dataclass(slots=True)
class _Allocation:
    region: Region
    memory: np.ndarray
    log: AccessLog
    handle: bytes = b""
    """By which other processes open it; none: nobody has asked."""
    is_opened: bool = False
    """Whether it is another process's."""
    is_seen: bool = False
    """Whether somebody has its memory as an array."""


class SimulatedEvent:
    def __init__(self, device: "SimulatedDevice", ticks: dict[int, int]) -> None:
        self._device, self.ticks = device, ticks
        self.done = threading.Event()

    def query(self) -> bool:
        if not self.done.is_set():
            return False
        self._device.host_saw(self.ticks)
        return True


class SimulatedStream:
    """Its work is done by a thread of its own."""

    def __init__(self, device: "SimulatedDevice", name: str, actor: int, seed: int) -> None:
        self.name = name
        self._device, self._clock = device, VectorClock(actor)
        self._random = random.Random(seed)
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"simulated {name}", daemon=True)
        self._thread.start()

    def copy(self, copies: Sequence[Copy]) -> None:
        self.uses([copy.source for copy in copies], [copy.destination for copy in copies])
        self._give(lambda: self._device.move(copies))

    def convert(self, work: Conversion) -> None:
        self.uses(work.data_parts() + work.scale_parts(), work.written())
        self._give(lambda: self._device.converted(work))

    def uses(self, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        self._device.given(self.name, self._clock, reads, writes)

    def record(self) -> Event:
        event = SimulatedEvent(self._device, self._device.ticks_of(self._clock))
        self._give(event.done.set)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        self._device.joined(self._clock, event.ticks)
        self._give(event.done.wait)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _give(self, job: Callable[[], object]) -> None:
        delay_s = self._random.uniform(0, _MAX_DELAY_S)
        self._work.put(lambda: (time.sleep(delay_s), self._device.turn(), job()))

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            job()


class _ComputeStream(SimulatedStream):
    """Its work is done by whoever gives it, at once."""

    def __init__(self, device: "SimulatedDevice", actor: int) -> None:
        self.name = "compute"
        self._device, self._clock = device, VectorClock(actor)

    def uses(self, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        self._device.allocates()
        super().uses(reads, writes)

    def close(self) -> None:
        """It has no thread."""

    def _give(self, job: Callable[[], object]) -> None:
        job()


class SimulatedDevice:
    """device.seam.SharingDevice. `close` it, and see that there are no `violations`."""

    number = 0
    asks_for_uses = True

    def __init__(self, seed: int = 0) -> None:
        """`seed`: of how long each stream takes for each piece of work."""
        self.violations: list[str] = []
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._names: dict[int, str] = {}
        self._host = VectorClock(self._actor("the host"))
        self._kept: dict[int, _Allocation] = {}
        self._next_address = _FIRST_ADDRESS
        self._streams: list[SimulatedStream] = []
        self._turn = threading.Event()
        self._turn.set()
        self._num_allocations = 0
        self._refused: Container[int] = ()
        self.compute: SimulatedStream = _ComputeStream(self, self._actor("compute"))

    def stream(self, name: str) -> SimulatedStream:
        with self._lock:
            made = SimulatedStream(self, name, self._actor(name), self._random.getrandbits(32))
            self._streams.append(made)
            return made

    def run_out(self, chosen: Container[int]) -> None:
        """From now on the allocations of these numbers, which count from 0, find no memory. Work that others put on the compute
        stream allocates as well: once each time that it says what it uses."""
        self._num_allocations, self._refused = 0, chosen

    def allocate(self, num_bytes: int) -> Region:
        self.allocates()
        memory = np.zeros(num_bytes, np.uint8)
        return self._keep(_Allocation(self._place(num_bytes), memory, AccessLog(num_bytes)))

    def pinned(self, num_bytes: int) -> Region:
        memory = np.zeros(num_bytes, np.uint8)
        region = Region(HOST, int(memory.ctypes.data), num_bytes)
        return self._keep(_Allocation(region, memory, AccessLog(num_bytes)))

    def free(self, region: Region) -> None:
        with self._lock:
            kept = self._kept.get(region.address)
            if kept is None or kept.is_opened:
                raise DeviceError(f"there is no allocation at {region.address:#x}")
            del self._kept[region.address]

    def host_view(self, region: Region, *, write: bool) -> memoryview:
        if region.device != HOST:
            raise DeviceError("the host cannot reach memory of a simulated device")
        with self._lock:
            self._host.tick()
            self._judge("the host", self._host, region, write=write)
        return self._bytes(region).data

    def array(self, region: Region) -> object:
        """For work on `compute`."""
        with self._lock:
            if (kept := self._find(region)) is not None:
                kept.is_seen = True
        return self._bytes(region)

    def export(self, region: Region) -> tuple[bytes, int]:
        """As of CUDA, but before anybody has an array of the allocation: its bytes move to memory that can be shared."""
        with self._lock:
            kept = self._containing(region) if region.device != HOST else None
            if kept is None or kept.is_opened:
                raise DeviceError("only memory that was allocated here can be shared with other processes")
            if not kept.handle:
                if kept.is_seen:
                    raise DeviceError("simulated memory is shared before somebody has it as an array")
                kept.handle, kept.memory, kept.log = share(kept.memory, kept.log)
            return kept.handle, region.address - kept.region.address

    def open(self, handle: bytes, num_bytes: int) -> Region:
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        memory, log = open_shared(handle)
        if num_bytes > len(memory):
            raise DeviceError(f"the allocation has {len(memory)} bytes, not {num_bytes}")
        whole = self._keep(_Allocation(self._place(len(memory)), memory, log, handle, is_opened=True))
        return whole.part(0, num_bytes)

    def shut(self, region: Region) -> None:
        with self._lock:
            kept = self._kept.get(region.address)
            if kept is None or not kept.is_opened:
                raise DeviceError(f"no other process's memory is open at {region.address:#x}")
            del self._kept[region.address]

    @contextmanager
    def held(self) -> Generator[None]:
        """Meanwhile streams do nothing."""
        self._turn.clear()
        try:
            yield
        finally:
            self._turn.set()

    def close(self) -> None:
        self._turn.set()
        for stream in self._streams:
            stream.close()

    def turn(self) -> None:
        self._turn.wait()

    def allocates(self) -> None:
        """Raises OutOfMemory where that was asked for."""
        number, self._num_allocations = self._num_allocations, self._num_allocations + 1
        if number in self._refused:
            raise OutOfMemory(f"the simulated device has no memory for allocation {number}")

    def host_saw(self, ticks: dict[int, int]) -> None:
        with self._lock, self._with_others():
            self._host.join(ticks)
            for log in self._shared():
                log.see(self._host.ticks)

    def joined(self, clock: VectorClock, ticks: dict[int, int]) -> None:
        with self._lock:
            clock.join(ticks)

    def ticks_of(self, clock: VectorClock) -> dict[int, int]:
        with self._lock:
            clock.join(self._host.ticks)
            return dict(clock.ticks)

    def given(self, name: str, clock: VectorClock, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        """Work that follows all that the host has done so far. Raises Bug."""
        with self._lock, self._with_others():
            clock.join(self._host.ticks)
            clock.tick()
            for region in reads:
                self._judge(name, clock, region, write=False)
            for region in writes:
                self._judge(name, clock, region, write=True)

    def move(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self._bytes(copy.destination)[:] = self._bytes(copy.source)

    def converted(self, work: Conversion) -> None:
        convert_regions(work, self._bytes)

    def _actor(self, name: str) -> int:
        actor = os.getpid() << 32 | next(_ACTORS)
        self._names[actor] = name
        return actor

    def _place(self, num_bytes: int) -> Region:
        with self._lock:
            region = Region(self.number, self._next_address, num_bytes)
            self._next_address += (-(-num_bytes // _GAP) + 1) * _GAP
        return region

    def _keep(self, made: _Allocation) -> Region:
        with self._lock:
            self._kept[made.region.address] = made
        return made.region

    def _shared(self) -> list[SharedLog]:
        logs = [kept.log for kept in self._kept.values() if isinstance(kept.log, SharedLog)]
        return sorted(logs, key=lambda log: log.number)

    @contextmanager
    def _with_others(self) -> Generator[None]:
        """Have the logs that are shared with other processes for oneself, and know what those have seen done."""
        with ExitStack() as stack:
            for log in self._shared():
                stack.enter_context(log.held())
                self._host.join(log.seen())
            yield

    def _judge(self, name: str, clock: VectorClock, region: Region, *, write: bool) -> None:
        found = self._find(region)
        if found is None:
            return  # the host's own memory, which a copy takes as it is
        check = found.log.write if write else found.log.read
        other = check(region.address - found.region.address, region.num_bytes, clock)
        if other is not None:
            what = "writes" if write else "reads"
            behind = self._names.get(other, "another process")
            self.violations.append(f"{name} {what} {region} and nothing orders that behind {behind}")
            raise Bug(self.violations[-1])

    def _find(self, region: Region) -> _Allocation | None:
        """Raises Bug for memory of the device that is not allocated."""
        found = self._containing(region)
        if found is None and region.device != HOST:
            raise Bug(f"{region} is not allocated on the simulated device")
        return found

    def _containing(self, region: Region) -> _Allocation | None:
        with self._lock:
            for kept in self._kept.values():
                start = region.address - kept.region.address
                if start >= 0 and start + region.num_bytes <= kept.region.num_bytes:
                    return kept
        return None

    def _bytes(self, region: Region) -> np.ndarray:
        found = self._find(region)
        if found is None:
            raise Bug(f"a simulated device copies from and to pinned memory, which {region} is not")
        start = region.address - found.region.address
        return found.memory[start : start + region.num_bytes]

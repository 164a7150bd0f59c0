"""Transfers by torch.distributed, point to point: NCCL between GPUs.

Each pair of processes has a communicator of its own, made when the first KV is to be moved, over a store that lives in the
authenticated connection of `kvtransfer/transport/pull.py`. The holder receives into the communicator's buffers and copies from
there into its pool, under a lock and on a stream of its own. So whatever a dead, stopped or aborted peer's communicator still
does, it does to those buffers. No copy into the pool waits for a peer: one is given to its stream when its bytes are there. The
fence waits for that stream alone, aborts the communicator, and need not wait for its end. The next write makes a new one.

NCCL's own connections are neither authenticated nor encrypted: use it on networks that are trusted. Tests run this with another
backend of torch on a simulated device. No GPU has run it."""

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from core.errors import ConfigError, DeviceError, TransferError
from device.port import PoolMemory
from device.seam import Copy, Region
from kvtransfer.copies import CopyRun, chunk_runs
from kvtransfer.transport.communicator import (
    BUFFER_BYTES,
    NUM_BUFFERS,
    Communicator,
    MakeGroup,
    nccl_group,
)
from kvtransfer.transport.pull import Exchange


class CollectiveMedium:
    host = ""
    needs_go = True
    memory: memoryview | None = None

    def __init__(self, name: str, make_group: MakeGroup, pool: PoolMemory) -> None:
        """`pool` lies on a device whose memory the groups that `make_group` makes can move."""
        self.name, self._make_group = name, make_group
        self.pool, self.num_bytes = pool, pool.region.num_bytes

    def take(self, exchange: Exchange) -> "_CollectiveIntake":
        return _CollectiveIntake(self.pool, self._connect(exchange, 0), self.name)

    def give(self, exchange: Exchange) -> "_CollectiveOutlet":
        return _CollectiveOutlet(self.pool, self._connect(exchange, 1), self.name)

    def close(self) -> None:
        """Do nothing: communicators belong to the connections."""

    def _connect(self, exchange: Exchange, rank: int) -> Communicator:
        return Communicator(self.name, self._make_group, self.pool, exchange, rank)


def nccl_medium(pool: PoolMemory) -> CollectiveMedium:
    """Return the medium of a pool in a GPU's memory. Raises ConfigError where there is no NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError(
            "transfer.transport nccl needs NVIDIA GPUs and a CUDA build of torch; use auto, shm or tcp"
        )
    return CollectiveMedium("nccl", nccl_group, pool)


class _Copies:
    """Copies between a pool and a communicator's buffers, on a stream of their own. For one thread at a time."""

    def __init__(self, pool: PoolMemory, name: str) -> None:
        self._pool = pool
        self._stream = pool.device.stream(name)
        self.close = self._stream.close

    def into_pool(self, runs: Sequence[CopyRun], buffer: Region) -> None:
        """Return, or raise TransferError, when nothing of it is on its way any more."""
        self._pool.order(self._stream)
        self._copy(runs, buffer, lambda run, part: Copy(self._region(run.destination, run), part))

    def from_pool(self, runs: Sequence[CopyRun], buffer: Region) -> None:
        """As `into_pool`."""
        self._copy(runs, buffer, lambda run, part: Copy(part, self._region(run.source, run)))

    def _region(self, start: int, run: CopyRun) -> Region:
        return self._pool.region.part(start, run.num_bytes)

    def _copy(
        self, runs: Sequence[CopyRun], buffer: Region, copy_of: Callable[[CopyRun, Region], Copy]
    ) -> None:
        at, copies = 0, list[Copy]()
        try:
            for run in runs:
                copies.append(copy_of(run, buffer.part(at, run.num_bytes)))
                at += run.num_bytes
            try:
                self._stream.copy(copies)
            finally:
                self._pool.poller.wait([self._stream.record()])
        except DeviceError as error:
            raise TransferError(f"copying to or from a communicator's buffers failed: {error}") from error


class _CollectiveIntake:
    def __init__(self, pool: PoolMemory, communicator: Communicator, name: str) -> None:
        self._communicator, self._copies = communicator, _Copies(pool, name)
        self._lock = threading.Lock()
        """Held while the pool is written."""
        self._aborted = self._closed = False

    def fetch(self, runs: Sequence[CopyRun], *, scratch: bool) -> None:
        groups = chunk_runs(runs, BUFFER_BYTES)
        for number, chunk in enumerate(groups):
            if not number:
                self._start(0, chunk)
            self._communicator.finish(number % NUM_BUFFERS)
            if number + 1 < len(groups):
                self._start(number + 1, groups[number + 1])
            if not scratch:
                self._empty(number, chunk)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
        self._communicator.abort()

    def close(self) -> None:
        self.abort()
        if not self._closed:
            self._closed = True
            self._copies.close()
            self._communicator.close()

    def _start(self, number: int, chunk: list[CopyRun]) -> None:
        if self._aborted:
            raise TransferError("the writer was cut off")
        self._communicator.start(number % NUM_BUFFERS, sum(run.num_bytes for run in chunk))

    def _empty(self, number: int, chunk: list[CopyRun]) -> None:
        with self._lock:
            if self._aborted:
                raise TransferError("the writer was cut off")
            self._copies.into_pool(chunk, self._communicator.buffers[number % NUM_BUFFERS])


class _CollectiveOutlet:
    def __init__(self, pool: PoolMemory, communicator: Communicator, name: str) -> None:
        self._communicator, self._copies = communicator, _Copies(pool, name)

    def supply(self, runs: Sequence[CopyRun], answered: threading.Event) -> None:
        groups = chunk_runs(runs, BUFFER_BYTES)
        for number, chunk in enumerate(groups):
            buffer = number % NUM_BUFFERS
            if number >= NUM_BUFFERS:
                self._communicator.finish(buffer)
            self._copies.from_pool(chunk, self._communicator.buffers[buffer])
            self._communicator.start(buffer, sum(run.num_bytes for run in chunk))
        for number in range(max(0, len(groups) - NUM_BUFFERS), len(groups)):
            self._communicator.finish(number % NUM_BUFFERS)

    def close(self) -> None:
        self._copies.close()
        self._communicator.close()

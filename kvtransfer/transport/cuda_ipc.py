"""CUDA IPC within a node: the holder maps the writer's pool into its own address space and copies from there, over NVLink, PCIe.

The writer exports its pool once for each holder; the holder's copies run on a stream of its own. As in every transport of
`kvtransfer/transport/pull.py` only the holder writes the holder's pool, so the fence waits for the holder's own stream and needs
no word from the writer. The driver keeps exported memory alive for as long as it is mapped.

Two processes on one card have handed over by it (`benchmarks/results/gpu.md`). Between cards it has been run on a stand-in for
the CUDA runtime alone."""

import threading
from collections.abc import Sequence
from typing import Any

import msgpack

from core.errors import DeviceError, TransferError
from device.port import PoolMemory
from device.seam import Copy, Region, SharingDevice
from kvtransfer.copies import CopyRun
from kvtransfer.transport.pull import SCRATCH_BYTES, Exchange
from kvtransfer.transport.shm import host_id


class CudaIpcMedium:
    name = "cuda_ipc"
    memory: memoryview | None = None
    needs_go = False

    def __init__(self, device: SharingDevice, pool: PoolMemory) -> None:
        """`pool` lies in an allocation of `device`."""
        self.device, self.pool, self.num_bytes = device, pool, pool.region.num_bytes
        self.host = host_id()
        self.scratch = device.allocate(SCRATCH_BYTES)

    def take(self, exchange: Exchange) -> "_CudaIntake":
        offer: Any = msgpack.unpackb(exchange.recv())
        handle, offset, num_bytes = offer
        try:
            mapped = self.device.open(handle, offset + num_bytes)
        except DeviceError as error:
            exchange.send(str(error).encode())
            raise TransferError(str(error)) from error
        exchange.send(b"")
        return _CudaIntake(self, mapped, offset)

    def give(self, exchange: Exchange) -> "_CudaOutlet":
        try:
            handle, offset = self.device.export(self.pool.region)
        except DeviceError as error:
            raise TransferError(f"the KV pool cannot be shared with other processes: {error}") from error
        exchange.send(msgpack.packb([handle, offset, self.num_bytes]))  # type: ignore[arg-type]
        if refusal := exchange.recv():
            raise TransferError(f"the holder cannot map this process's GPU memory: {refusal.decode()}")
        return _CudaOutlet()

    def close(self) -> None:
        """The process's end gives everything back."""


class _CudaOutlet:
    def supply(self, runs: Sequence[CopyRun], answered: threading.Event) -> None:
        """The holder copies by itself."""

    def close(self) -> None:
        """The holder unmaps."""


class _CudaIntake:
    def __init__(self, medium: CudaIpcMedium, mapped: Region, offset: int) -> None:
        self._medium, self._mapped = medium, mapped
        self._source = mapped.part(offset, mapped.num_bytes - offset)
        self._stream = medium.device.stream("cuda_ipc")
        self._lock = threading.Lock()
        """Held by a fetch from its first to its last touch of the pool."""
        self._aborted = self._closed = False

    def fetch(self, runs: Sequence[CopyRun], *, scratch: bool) -> None:
        medium = self._medium
        target = medium.scratch if scratch else medium.pool.region
        try:
            copies = [
                Copy(
                    target.part(run.destination, run.num_bytes), self._source.part(run.source, run.num_bytes)
                )
                for run in runs
            ]
        except DeviceError as error:
            raise TransferError(f"a run outside of a KV pool: {error}") from error
        with self._lock:
            if self._aborted:
                raise TransferError("the writer was cut off")
            self._copy(copies)

    def abort(self) -> None:
        self._aborted = True
        with self._lock:  # waits for a copy under way, which does not depend on the writer
            pass

    def close(self) -> None:
        self.abort()
        if not self._closed:
            self._closed = True
            self._stream.close()
            self._medium.device.shut(self._mapped)

    def _copy(self, copies: Sequence[Copy]) -> None:
        """Returns, or raises TransferError, when nothing of it is on its way any more."""
        try:
            self._medium.pool.order(self._stream)
            try:
                self._stream.copy(copies)
            finally:
                self._medium.pool.poller.wait([self._stream.record()])
        except DeviceError as error:
            raise TransferError(f"copying from the writer's GPU memory failed: {error}") from error

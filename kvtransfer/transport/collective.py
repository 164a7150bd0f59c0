"""Transfers by torch.distributed, point to point: NCCL between GPUs, gloo in its place between CPUs.

Each pair of processes has a communicator of its own, made when the first KV is to be moved, over a store that lives in the
authenticated connection of `kvtransfer/transport/pull.py`. The holder receives into a bounce buffer and copies from there into
its pool under a lock. So whatever a dead, stopped or aborted peer's communicator still does, it does to the bounce buffer, and
the fence need not wait for the communicator's end, which may take its timeout. The next write makes a new one.

gloo's and NCCL's own connections are neither authenticated nor encrypted: use them on networks that are trusted."""

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import msgpack
import torch
import torch.distributed as dist

from core.errors import ConfigError, TransferError
from kvtransfer.copies import CopyRun, chunk_runs
from kvtransfer.transport.pull import Exchange

Backend = Literal["gloo", "nccl"]
_CHUNK_BYTES = 4 << 20
_TIMEOUT = timedelta(seconds=30)


def check(backend: Backend) -> None:
    """Raise ConfigError where this machine lacks the backend."""
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError(
            "transfer.transport nccl needs NVIDIA GPUs and a CUDA build of torch; use auto, shm or tcp"
        )
    if backend == "gloo" and not dist.is_gloo_available():
        raise ConfigError("transfer.transport gloo needs a torch build with gloo; use auto, shm or tcp")


class ChannelStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """The store in which two ranks find each other while they connect. What one sets is sent to the other, which waits for it."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._exchange.send(msgpack.packb([key, self._values[key]]))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        while key not in self._values:
            message: Any = msgpack.unpackb(self._exchange.recv())
            self._values[message[0]] = message[1]
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the exchange has its own timeout."""


class CollectiveMedium:
    host = ""
    needs_go = True

    def __init__(self, backend: Backend, pool: torch.Tensor, hostname: str) -> None:
        """`pool` (num_bytes,) uint8, on the device that the backend moves. Raises ConfigError."""
        check(backend)
        if (pool.device.type == "cuda") != (backend == "nccl"):
            raise ConfigError(f"transfer.transport {backend} cannot move a KV pool on {pool.device.type}")
        self.name: str = backend
        self.pool, self._hostname, self.num_bytes = pool, hostname, pool.numel()
        self.memory = pool.numpy().data if pool.device.type == "cpu" else None

    def take(self, exchange: Exchange) -> "_CollectiveIntake":
        return _CollectiveIntake(self.pool, self._connect(exchange, 0))

    def give(self, exchange: Exchange) -> "_CollectiveOutlet":
        return _CollectiveOutlet(self.pool, self._connect(exchange, 1))

    def close(self) -> None:
        """Do nothing: communicators belong to the connections."""

    def _connect(self, exchange: Exchange, rank: int) -> Any:
        """Return the pair's communicator, after a first byte has gone through it. Raises TransferError."""
        store = ChannelStore(exchange)
        try:
            group = self._make(store, rank)
            byte = torch.zeros(1, dtype=torch.uint8, device=self.pool.device)
            work = group.send([byte], 0, 0) if rank else group.recv([byte], 1, 0)
            _finish(work)
            store.set(f"ready{rank}", b"1")
            store.get(f"ready{1 - rank}")
        except (RuntimeError, ValueError) as error:
            raise TransferError(f"no {self.name} communicator: {error}") from error
        return group

    def _make(self, store: ChannelStore, rank: int) -> Any:
        if self.name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options.config.blocking = 0
            options._timeout = _TIMEOUT  # pyright: ignore[reportPrivateUsage]
            return dist.ProcessGroupNCCL(store, rank, 2, options)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._hostname)]
        options._timeout = _TIMEOUT
        return gloo(store, rank, 2, options)


def _finish(work: Any) -> None:
    """Wait for the operations. Raises TransferError when the peer did not do its part."""
    try:
        work.wait(_TIMEOUT)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
    except RuntimeError as error:
        raise TransferError(f"the other side of the communicator failed: {error}") from error


def _end(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # a broken communicator may refuse
        group.abort()


class _Bounce:
    """Two buffers on the pool's device. One is being sent or received while the other is packed or emptied."""

    def __init__(self, like: torch.Tensor) -> None:
        self._buffers = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device=like.device) for _ in range(2)]

    def piece(self, number: int, num_bytes: int) -> torch.Tensor:
        return self._buffers[number % 2][:num_bytes]


class _CollectiveIntake:
    def __init__(self, pool: torch.Tensor, group: Any) -> None:
        self._pool, self._group, self._bounce = pool, group, _Bounce(pool)
        self._lock = threading.Lock()
        """Held while the pool is written."""
        self._aborted = False

    def fetch(self, runs: Sequence[CopyRun], *, scratch: bool) -> None:
        if self._aborted:
            raise TransferError("the writer was cut off")
        groups = chunk_runs(runs, _CHUNK_BYTES)
        pending = self._start(0, groups[0]) if groups else None
        for number, chunk in enumerate(groups):
            _finish(pending)
            if number + 1 < len(groups):
                pending = self._start(number + 1, groups[number + 1])
            if not scratch:
                self._empty(number, chunk)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
        _end(self._group)

    def close(self) -> None:
        self.abort()

    def _start(self, number: int, chunk: list[CopyRun]) -> Any:
        piece = self._bounce.piece(number, sum(run.num_bytes for run in chunk))
        return self._group.recv([piece], 1, number % 2)

    def _empty(self, number: int, chunk: list[CopyRun]) -> None:
        piece = self._bounce.piece(number, _CHUNK_BYTES)
        with self._lock:
            if self._aborted:
                raise TransferError("the writer was cut off")
            at = 0
            for run in chunk:
                target = self._pool[run.destination : run.destination + run.num_bytes]
                target.copy_(piece[at : at + run.num_bytes])
                at += run.num_bytes
            if self._pool.is_cuda:
                torch.cuda.current_stream().synchronize()


class _CollectiveOutlet:
    def __init__(self, pool: torch.Tensor, group: Any) -> None:
        self._pool, self._group, self._bounce = pool, group, _Bounce(pool)

    def supply(self, runs: Sequence[CopyRun], answered: threading.Event) -> None:
        pending: list[Any] = []
        for number, chunk in enumerate(chunk_runs(runs, _CHUNK_BYTES)):
            if len(pending) == 2:
                _finish(pending.pop(0))
            pending.append(self._group.send([self._pack(number, chunk)], 0, number % 2))
        for work in pending:
            _finish(work)

    def close(self) -> None:
        _end(self._group)

    def _pack(self, number: int, chunk: list[CopyRun]) -> torch.Tensor:
        piece = self._bounce.piece(number, sum(run.num_bytes for run in chunk))
        at = 0
        for run in chunk:
            piece[at : at + run.num_bytes].copy_(self._pool[run.source : run.source + run.num_bytes])
            at += run.num_bytes
        return piece

"""Shared memory within a host: the holder's pool is a file in /dev/shm that writers map and copy into.

A writer's mapping cannot be revoked while it lives, so the fence is the kernel's word that its process has ended. Segments
carry their owner's pid and start time in their names; those of dead owners are removed by whoever starts next."""

import asyncio
import contextlib
import mmap
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from core.errors import TransferError
from core.kv import KVShard
from core.messages import RegionKey
from kvtransfer.copies import CopyRun

_FOLDER = Path("/dev/shm")
_PREFIX = "baton-kv"
_THREAD_BYTES = 16 << 20
"""Copies beyond this size leave the event loop's thread."""


def host_id() -> str:
    """Equal for two processes exactly when they share /dev/shm: the boot and the mount's device."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat(_FOLDER).st_dev}"


def _start_time(pid: int) -> str | None:
    """Clock ticks since boot at which `pid` started; None when there is no such process (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


class SharedSegment:
    """A KV pool in shared memory. `close` unlinks it; readers of the mapping may go on until they drop it."""

    def __init__(self, num_bytes: int) -> None:
        remove_orphans()
        pid = os.getpid()
        self.path = _FOLDER / f"{_PREFIX}-{pid}-{_start_time(pid)}-{uuid.uuid4().hex[:12]}"
        descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            self.path.unlink()
            raise TransferError(
                f"cannot take {num_bytes >> 20} MiB of shared memory in {_FOLDER}: {error.strerror}. "
                "Give the container a larger /dev/shm, lower engine.kv_bytes, or set transfer.transport to tcp."
            ) from error
        finally:
            os.close(descriptor)
        self.buffer = memoryview(self._map)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def remove_orphans() -> None:
    """Unlink segments whose owner is dead (it was killed and could not do it)."""
    for path in _FOLDER.glob(f"{_PREFIX}-*"):
        with contextlib.suppress(ValueError, PermissionError):
            _, _, pid, start, _ = path.name.split("-")
            if _start_time(int(pid)) != start:
                path.unlink(missing_ok=True)


class ShmReceiver:
    counts_bytes = False

    def __init__(self, segment: SharedSegment) -> None:
        self._segment, self._host = segment, host_id()

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        return RegionKey("shm", str(self._segment.path), "pool", self._host, shard, num_blocks)

    async def fence(self, writer: str, pid: int | None) -> None:
        """Waits for the writer's process to end, for as long as that takes."""
        if pid is None or pid == os.getpid():
            return
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    async def close(self) -> None:
        self._segment.close()


class ShmSender:
    name = "shm"
    vouches = True

    def __init__(self, source: memoryview) -> None:
        self._source, self._host = source, host_id()
        self._maps: dict[str, memoryview] = {}

    def reaches(self, region: RegionKey) -> bool:
        return region.transport == self.name and region.host == self._host

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        target = self._map(region)
        if sum(run.num_bytes for run in runs) > _THREAD_BYTES:
            await asyncio.to_thread(self._copy, target, runs)
        else:
            self._copy(target, runs)

    def forget(self, endpoint_owner: str) -> None:
        """Unmap segments that have been unlinked: their holders are gone."""
        for path in [path for path in self._maps if not os.path.exists(path)]:
            del self._maps[path]

    async def close(self) -> None:
        self._maps.clear()

    def _map(self, region: RegionKey) -> memoryview:
        mapped = self._maps.get(region.endpoint)
        if mapped is None:
            path = Path(region.endpoint)
            if path.parent != _FOLDER or not path.name.startswith(_PREFIX):
                raise TransferError(f"{region.endpoint} is not a KV segment")
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError as error:
                raise TransferError(f"cannot open the KV segment {path}: {error.strerror}") from error
            try:
                mapped = self._maps[region.endpoint] = memoryview(mmap.mmap(descriptor, 0))
            finally:
                os.close(descriptor)
        return mapped

    def _copy(self, target: memoryview, runs: Sequence[CopyRun]) -> None:
        source = self._source
        for run in runs:
            target[run.destination : run.destination + run.num_bytes] = source[
                run.source : run.source + run.num_bytes
            ]

"""Shared memory within a host: the holder's pool is a file in /dev/shm that writers map and copy into.

A mapping cannot be revoked while its process lives. So a writer claims each grant before its first write, by a symbolic link
beside the segment that names its process, and the fence either takes that name first (the writer can then never claim it) or
waits for the kernel's word that the claiming process has ended. Making a link is atomic: exactly one side gets the name.

Segments carry their owner's pid and start time in their names; those of dead owners are removed by whoever starts next."""

import asyncio
import contextlib
import ctypes
import hashlib
import logging
import mmap
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from core.errors import TransferError
from core.kv import KVShard
from core.messages import RegionKey
from core.threads import in_thread
from kvtransfer.copies import CopyRun, chunk_runs
from kvtransfer.transport.checks import destination_crc, source_crc
from kvtransfer.wire import POOL_FORMAT

log = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
_PREFIX = "baton-kv"
_TAKEN_BACK = "taken back"
TURN_BYTES = 4 << 20
"""Bytes copied in one turn of the event loop: a tenth or two of a millisecond, less than another thread's wake-up costs."""
LONG_BYTES = 64 << 20
"""A longer run is copied in one go, on a thread: memmove then writes past the caches, for which smaller pieces are too short."""


def host_id() -> str:
    """Return a name that two processes share exactly when they share /dev/shm and see each other's pids: boot, mount and pid
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat(_FOLDER).st_dev}:{os.stat('/proc/self/ns/pid').st_ino}"


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state and its start in clock ticks since boot; empty when there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return fields[0], fields[19]


def _claim_path(segment: str, grant_id: str) -> str:
    return f"{segment}-{hashlib.blake2b(grant_id.encode(), digest_size=8).hexdigest()}"


class SharedSegment:
    """A KV pool in shared memory. `close` unlinks it; readers of the mapping may go on until they drop it."""

    def __init__(self, num_bytes: int) -> None:
        remove_orphans()
        pid = os.getpid()
        self.path = _FOLDER / f"{_PREFIX}-{pid}-{_stat(pid)[1]}-{uuid.uuid4().hex[:12]}"
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
        for claim in _FOLDER.glob(f"{self.path.name}-*"):
            claim.unlink(missing_ok=True)


def remove_orphans() -> None:
    """Unlink segments, and claims on them, whose owner is dead (it was killed and could not do it)."""
    for path in _FOLDER.glob(f"{_PREFIX}-*"):
        with contextlib.suppress(ValueError, PermissionError):
            _, _, pid, start, *_ = path.name.split("-")
            state, started = _stat(int(pid))
            if started != start or state in "ZX":
                path.unlink(missing_ok=True)


async def _process_end(pid: int, start: str) -> None:
    """Wait until all threads of the process that is `pid` since `start` have ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _stat(pid)[1] != start:
            return  # somebody else's pid by now
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)
    finally:
        os.close(descriptor)


class ShmReceiver:
    def __init__(self, segment: SharedSegment) -> None:
        self._segment, self._host = segment, host_id()

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        return RegionKey(
            transport="shm",
            endpoint=str(self._segment.path),
            name=POOL_FORMAT,
            host=self._host,
            shard=shard,
            num_blocks=num_blocks,
        )

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        then()  # a writer sends its last message after its last write

    def ended(self, grant_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_claim_path(str(self._segment.path), grant_id))

    async def fence(self, writer: str, grant_id: str) -> None:
        """Take the grant's claim, or wait for the process that has it to end, for as long as that takes."""
        claim = _claim_path(str(self._segment.path), grant_id)
        with contextlib.suppress(FileExistsError):
            os.symlink(_TAKEN_BACK, claim)
            return  # the writer has written nothing; while the link stays, it cannot claim the grant
        with contextlib.suppress(FileNotFoundError):
            claimant = os.readlink(claim)
            if claimant != _TAKEN_BACK:
                pid, _, start = claimant.partition(":")
                await _process_end(int(pid), start)
                os.unlink(claim)

    async def close(self) -> None:
        self._segment.close()


class _Memory:
    """Memory by address, kept alive by its view."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.size = view, len(view)
        self.address: int = np.frombuffer(view, np.uint8).ctypes.data


class ShmSender:
    name = "shm"
    vouches = True

    def __init__(self, source: memoryview, *, checksum: bool = False) -> None:
        """With `checksum`, what was written is read back and compared with the source's CRC-32 from before."""
        self._source, self._host = _Memory(source), host_id()
        self._checksum = checksum
        self._me = f"{os.getpid()}:{_stat(os.getpid())[1]}"
        self._maps: dict[str, _Memory] = {}
        self._scratch = _Memory(memoryview(bytearray(1)))
        self._claims: dict[str, set[str]] = {}

    def reaches(self, region: RegionKey) -> bool:
        return region.transport == self.name and region.host == self._host

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        target = self._map(region)
        self._claim(region.endpoint, grant_id)
        if self._checksum:
            await in_thread(lambda: self._copy_checked(target, runs))
            return
        if sum(run.num_bytes for run in runs) <= TURN_BYTES:
            self._copy(target, runs)
            return
        if max(run.num_bytes for run in runs) > LONG_BYTES:
            await in_thread(lambda: self._copy(target, runs))
            return
        for part in chunk_runs(runs, TURN_BYTES):
            self._copy(target, part)
            await asyncio.sleep(0)

    def carried(self, region: RegionKey) -> None:
        """Return nothing: a write ends when its bytes are there."""

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        """Copy into memory of the same kind, which takes as long as a write."""
        self._map(region)
        num_bytes = min(num_bytes, self._source.size)
        if self._scratch.size < num_bytes:
            self._scratch = _Memory(memoryview(bytearray(num_bytes)))
        self._copy(self._scratch, [CopyRun(0, 0, num_bytes)])
        return num_bytes

    def ended(self, grant_id: str) -> None:
        self._claims.pop(grant_id, None)

    def forget(self, endpoint_owner: str) -> None:
        """Unmap segments whose holders are gone: they have been unlinked, or can be."""
        remove_orphans()
        for path in [path for path in self._maps if not os.path.exists(path)]:
            del self._maps[path]

    async def close(self) -> None:
        self._maps.clear()

    def _map(self, region: RegionKey) -> _Memory:
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
                mapped = self._maps[region.endpoint] = _Memory(memoryview(mmap.mmap(descriptor, 0)))
            finally:
                os.close(descriptor)
        return mapped

    def _claim(self, segment: str, grant_id: str) -> None:
        claimed = self._claims.setdefault(grant_id, set())
        if segment in claimed:
            return
        try:
            os.symlink(self._me, _claim_path(segment, grant_id))
        except OSError as error:
            taken = isinstance(error, FileExistsError)
            why = "the holder has taken it back" if taken else error.strerror
            raise TransferError(f"grant {grant_id} cannot be used: {why}") from error
        claimed.add(segment)

    def _copy(self, target: _Memory, runs: Sequence[CopyRun]) -> None:
        source = self._source
        for run in runs:
            if run.source + run.num_bytes > source.size or run.destination + run.num_bytes > target.size:
                raise TransferError(f"{run} lies outside of a KV pool")
            # Other threads run meanwhile, which a memoryview's assignment would not let them.
            ctypes.memmove(target.address + run.destination, source.address + run.source, run.num_bytes)

    def _copy_checked(self, target: _Memory, runs: Sequence[CopyRun]) -> None:
        expected = source_crc(self._source.view, runs)
        for _ in range(2):
            self._copy(target, runs)
            found = destination_crc(target.view, runs)
            if found == expected:
                return
            log.error(
                "%d bytes of KV were damaged on their way into shared memory", sum(r.num_bytes for r in runs)
            )
        raise TransferError("KV arrived corrupted twice in shared memory")

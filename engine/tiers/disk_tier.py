"""The disk tier: one file of fixed slots, each with a header that says what it holds and a checksum of it.

It survives a restart: the headers are read again, and those of another model or layout are ignored. Direct I/O is used where the
file system has it, so that KV does not push other files out of the page cache. A damaged slot, a full disk or a failing one costs
hits, never a wrong token: a block that cannot be read back exactly counts as missing."""

import contextlib
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from core.errors import ConfigError
from engine.tiers.block_digests import DIGEST_BYTES
from engine.tiers.leaves_first import LeavesFirst

log = logging.getLogger(__name__)

_MAGIC = b"BATONKV1"
_HEADER = struct.Struct(f"<8s{DIGEST_BYTES}s{DIGEST_BYTES}sII")
_PAGE = 4096
_MAX_ERRORS = 16
"""The number of failed writes in a row after which the disk is not used any more."""


class DiskTier:
    """Blocks of `block_bytes` in a file of at most `max_bytes` at `path`. For one thread at a time. Raises ConfigError."""

    def __init__(
        self, path: Path, max_bytes: int, block_bytes: int, fingerprint: bytes, lock: int | None = None
    ) -> None:
        """`lock` is a descriptor that keeps others away from the file. It is closed with the tier."""
        self._lock = lock
        self._block_bytes, self._fingerprint = block_bytes, fingerprint[:DIGEST_BYTES].ljust(DIGEST_BYTES)
        self._slot_bytes = _PAGE + -(-block_bytes // _PAGE) * _PAGE
        self._num_slots = max_bytes // self._slot_bytes
        if not self._num_slots:
            raise ConfigError(
                f"engine.disk_cache_bytes of {max_bytes} holds no block of {self._slot_bytes} bytes: make it larger"
            )
        self._slots: dict[bytes, int] = {}
        self._order = LeavesFirst()
        self.on_gone: Callable[[bytes], None] = lambda _: None
        """Called with each block that is given up."""
        self._page = mmap.mmap(-1, self._slot_bytes)  # aligned, as direct I/O wants it
        self._num_errors = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(path)
            os.ftruncate(self._file, self._num_slots * self._slot_bytes)
        except OSError as error:
            raise ConfigError(
                f"engine.disk_cache_path {path} cannot be used: {error.strerror or error}"
            ) from error
        self._free = self._read_headers()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    @property
    def is_off(self) -> bool:
        """Whether the disk has failed too often."""
        return self._num_errors >= _MAX_ERRORS

    def put(self, digest: bytes, content: bytes, before: bytes = b"") -> None:
        """Write a block that follows the block `before`, in place of the one that goes first when all slots are taken. An empty
        `before` is not known, as it is for blocks of an earlier run."""
        if self.is_off or digest in self._slots:
            return
        if not self._free:
            self._give_up(self._order.take()[0])
        slot = self._free.pop()
        header = _HEADER.pack(_MAGIC, self._fingerprint, digest, len(content), zlib.crc32(content))
        self._page[: len(header)] = header
        self._page[_PAGE : _PAGE + len(content)] = content
        try:
            if os.pwritev(self._file, [self._page], slot * self._slot_bytes) != self._slot_bytes:
                raise OSError("short write")
        except OSError as error:
            self._failed("write", error)
            self._free.append(slot)
            return
        self._num_errors = 0
        self._slots[digest] = slot
        self._order.use(digest, before)

    def get(self, digest: bytes) -> bytes | None:
        """Read a block. Returns None when it is not there, or not as it was written, in which case it is forgotten."""
        slot = self._slots.get(digest)
        if slot is None:
            return None
        content = self._read(slot, digest)
        if digest not in self._slots:  # the disk is left alone from now on
            return None
        if content is None:
            self._order.remove(digest)
            self._give_up(digest)
            return None
        self._order.use(digest)
        return content

    def drop(self) -> None:
        """Forget all blocks, also for the next process that reads the file."""
        self._give_up_all()
        try:
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, self._num_slots * self._slot_bytes)
        except OSError as error:
            self._failed("write", error)

    def close(self) -> None:
        os.close(self._file)
        self._page.close()
        if self._lock is not None:
            os.close(self._lock)

    def _give_up(self, digest: bytes) -> None:
        self._free.append(self._slots.pop(digest))
        self.on_gone(digest)

    def _give_up_all(self) -> None:
        self._order.clear()
        for digest in [*self._slots]:
            self._give_up(digest)

    def _read(self, slot: int, digest: bytes) -> bytes | None:
        try:
            if os.preadv(self._file, [self._page], slot * self._slot_bytes) != self._slot_bytes:
                raise OSError("short read")
        except OSError as error:
            self._failed("read", error)
            return None
        magic, fingerprint, named, size, crc = _HEADER.unpack_from(self._page)
        content = self._page[_PAGE : _PAGE + min(size, self._block_bytes)]
        right = (magic, fingerprint, named, size) == (_MAGIC, self._fingerprint, digest, self._block_bytes)
        if not right or zlib.crc32(content) != crc:
            log.error("slot %d of the KV disk cache is damaged; its block will be computed again", slot)
            return None
        return content

    def _read_headers(self) -> list[int]:
        """Take over what an earlier process has left. Returns the other slots."""
        free: list[int] = []
        head = mmap.mmap(-1, _PAGE)
        for slot in range(self._num_slots):
            magic = digest = fingerprint = b""
            size = 0
            with contextlib.suppress(OSError):
                os.preadv(self._file, [head], slot * self._slot_bytes)
                magic, fingerprint, digest, size, _ = _HEADER.unpack_from(head)
            if (magic, fingerprint, size) == (_MAGIC, self._fingerprint, self._block_bytes):
                self._slots[digest] = slot
                self._order.use(digest)
            else:
                free.append(slot)
        head.close()
        if self._slots:
            log.info("the KV disk cache holds %d blocks of an earlier run", len(self._slots))
        return free

    def _failed(self, what: str, error: OSError) -> None:
        self._num_errors += 1
        if self.is_off:
            log.error("the KV disk cache is left alone after %d errors; the last one: %s", _MAX_ERRORS, error)
            self._give_up_all()
        elif self._num_errors == 1:
            log.warning("the KV disk cache: %s failed: %s", what, error.strerror or error)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # tmpfs and some network file systems have no direct I/O
        return os.open(path, flags, 0o600)

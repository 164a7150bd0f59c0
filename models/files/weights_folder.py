"""The folder in which packed weights are stored for all processes of this user: who writes a file, and which files go.

A file's name is the digest of all that its content depends on. It has that name only when it is complete. Until then it is a
draft, which whoever writes it holds locked. So a process that is killed leaves a draft that the next one writes anew or removes.
A file that is used is locked as well, by all of its users."""

import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from core.user_cache import user_cache
from kernels.cpu.weights_file import DamagedFile, MappedFile, OpenFile, maps_large_pages

_log = logging.getLogger(__name__)
_FILE, _DRAFT = ".weights", ".draft"
_UNUSED_S: Final = 30 * 86_400.0
"""How long a file stays that nobody uses."""
_PATIENCE_S, _POLL_S = 60.0, 0.02
"""How long to wait for a writer that shows no progress."""
_LOCAL: Final = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay"))


class WeightsDraft:
    """The right to write one file."""

    def __init__(self, path: Path, file: OpenFile) -> None:
        self._path, self.file = path, file

    def beat(self) -> None:
        """Show those that wait for the file that it is being made."""
        os.utime(self.file.descriptor)

    def publish(self) -> None:
        """Give the file its name, under which it is in use from now on. Raises OSError."""
        self._path.rename(self._path.with_suffix(_FILE))
        fcntl.flock(self.file.descriptor, fcntl.LOCK_SH)

    def give_up(self) -> None:
        with suppress(OSError):
            self._path.unlink()
        # Whoever waits finds no such file, and needs no longer wait.
        fcntl.flock(self.file.descriptor, fcntl.LOCK_UN)


class WeightsFolder:
    def __init__(
        self,
        path: Path,
        *,
        patience_s: float = _PATIENCE_S,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        """Make the folder. Raises OSError."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._patience_s, self._free_bytes = path, patience_s, free_bytes

    def claim(self, key: str) -> MappedFile | WeightsDraft | None:
        """Return the file, or the right to write it. While another process writes it, wait. None: that process has given up, or
        shows no progress. Raises OSError."""
        writer: OpenFile | None = None
        progress, since = 0, 0.0
        while True:
            if (found := self._opened(key)) is not None:
                return found
            file = writer or self._open_draft(key)
            if _locks(file, fcntl.LOCK_EX):
                if self._is_draft(key, file):
                    return self._begun(key, file)
                fcntl.flock(file.descriptor, fcntl.LOCK_UN)  # it may have become the file
                if writer is not None:
                    return self._opened(key)
                continue
            state, now = os.fstat(file.descriptor).st_mtime_ns, time.monotonic()
            if writer is None or state != progress:
                writer, progress, since = file, state, now
            if now - since > self._patience_s:
                return None
            time.sleep(_POLL_S)

    def discard(self, key: str) -> None:
        """Remove a file that is of no use. Whoever has mapped it keeps what it has."""
        with suppress(OSError):
            self._file(key).unlink()

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a file of that size may be added, if those that nobody uses are removed."""
        held = [path.stat().st_blocks * 512 for path, _ in self._files() if _is_used(path)]
        return sum(held) + num_bytes <= self._limit_bytes()

    def make_room(self, num_bytes: int) -> bool:
        """Remove files that nobody has used for long, and more while there is no room for `num_bytes`, the least recently used
        first. Returns whether there is room."""
        self._remove_drafts()
        files = sorted(self._files(), key=lambda file: file[1].st_mtime)
        held, limit = sum(status.st_blocks * 512 for _, status in files), self._limit_bytes()
        for path, status in files:
            is_old = time.time() - status.st_mtime > _UNUSED_S
            if (is_old or held + num_bytes > limit) and _removed(path):
                held -= status.st_blocks * 512
        return held + num_bytes <= limit

    def _limit_bytes(self) -> int:
        """Return what all files may have: half of what other files leave of the disk."""
        held = sum(status.st_blocks * 512 for _, status in self._files())
        return (self._free_bytes(self._path) + held) // 2

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found: list[tuple[Path, os.stat_result]] = []
        for path in self._path.glob(f"*{_FILE}"):
            with suppress(FileNotFoundError):
                found.append((path, path.stat()))
        return found

    def _remove_drafts(self) -> None:
        for path in self._path.glob(f"*{_DRAFT}"):
            _removed(path)

    def _file(self, key: str) -> Path:
        return self._path / f"{key}{_FILE}"

    def _draft(self, key: str) -> Path:
        return self._path / f"{key}{_DRAFT}"

    def _opened(self, key: str) -> MappedFile | None:
        """Return None where there is no such file, or where it is damaged, which removes it."""
        path = self._file(key)
        try:
            file = OpenFile(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except FileNotFoundError:
            return None
        if not _locks(file, fcntl.LOCK_SH):
            return None  # it is being removed, or was named this moment
        try:
            _check_owned(os.fstat(file.descriptor), f"{path}")
            mapped = MappedFile(file)
            os.utime(path)
            return mapped
        except (DamagedFile, OSError, KeyError, TypeError, ValueError) as error:
            _log.warning("packed weights in %s are not used, and the file is removed: %s", path, error)
            self.discard(key)
            return None

    def _open_draft(self, key: str) -> OpenFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return OpenFile(os.open(self._draft(key), flags, 0o600))

    def _is_draft(self, key: str, file: OpenFile) -> bool:
        """Return whether a draft that was opened before has still that name."""
        try:
            return self._draft(key).stat().st_ino == os.fstat(file.descriptor).st_ino
        except FileNotFoundError:
            return False

    def _begun(self, key: str, file: OpenFile) -> WeightsDraft:
        _check_owned(os.fstat(file.descriptor), f"{self._draft(key)}")
        os.ftruncate(file.descriptor, 0)
        return WeightsDraft(self._draft(key), file)


def default_folder() -> Path | None:
    """Return the folder in the user's cache. None where that is no local disk, where its files are mapped in small pages, and in
    a pod, whose disk is counted."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return None
    folder = user_cache() / "weights"
    if _filesystem_of(folder) not in _LOCAL:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if maps_large_pages(folder) else None
    except OSError as error:
        _log.warning("packed weights are not shared, since nothing can be stored in %s: %s", folder, error)
        return None


def _filesystem_of(path: Path) -> str:
    """Return the kind of file system that the path, or what there is of it, is on; empty where the system does not say."""
    while not path.exists() and path != path.parent:
        path = path.parent
    device, kind = path.resolve().stat().st_dev, ""
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4].encode().decode("unicode_escape")
            with suppress(OSError):
                if os.stat(point).st_dev == device:
                    kind = after.split()[0]
    return kind


def _check_owned(status: os.stat_result, path: str) -> None:
    """Raises PermissionError where somebody else could have written it."""
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} belongs to another user, or others may write to it: remove it, or name another folder in model.packed_cache"
        )


def _locks(file: OpenFile, kind: int) -> bool:
    try:
        fcntl.flock(file.descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_used(path: Path) -> bool:
    try:
        return not _locks(OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC)), fcntl.LOCK_EX)
    except OSError:
        return False


def _removed(path: Path) -> bool:
    """Remove a file unless it is used. Returns whether it is gone."""
    try:
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        if not _locks(file, fcntl.LOCK_EX):
            return False
        path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True

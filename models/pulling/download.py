"""Fetches one file: from where an earlier attempt ended, checked as it comes, and under its name only once it is whole."""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

from core.errors import ConfigError
from models.pulling.remote_files import Interrupted, RemoteFile

_log = logging.getLogger(__name__)
_CHUNK: Final = 1 << 20
_TRIES: Final = 5
"""Attempts in a row that bring nothing."""
_FIRST_WAIT_S: Final = 0.5
_PARTS: Final = ".parts"
"""The folder of files that are not whole. No file that is needed begins with a dot."""

Count = Callable[[int], None]
"""Takes how many bytes have come by now, also of earlier attempts."""


class Stopped(Exception):
    pass


def part_of(folder: Path, file: RemoteFile) -> Path:
    """Return where a file is until it is whole. One that has changed meanwhile begins anew, under another name."""
    said = hashlib.sha256(f"{file.path}\n{file.version}".encode()).hexdigest()[:24]
    return folder / _PARTS / said


def bytes_there(folder: Path, file: RemoteFile) -> int:
    """Return how many bytes an earlier attempt has left."""
    for path in (folder / file.path, part_of(folder, file)):
        if path.is_file():
            return min(path.stat().st_size, file.num_bytes)
    return 0


def fetch(file: RemoteFile, folder: Path, count: Count, stop: threading.Event) -> None:
    """Fetch a file unless it is there. Raises ConfigError, OSError, and Stopped soon after `stop` is set."""
    path, part = folder / file.path, part_of(folder, file)
    if path.is_file():
        count(file.num_bytes)
        return
    _check_within(folder, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "r+b") as draft:
        digests = _Digests(file)
        digests.update_from(draft, stop)
        if draft.tell() > file.num_bytes:
            draft.seek(0)
            draft.truncate()
            digests = _Digests(file)
        _read_all(file, draft, digests, count, stop)
        if complaint := digests.complaint:
            part.unlink()
            raise ConfigError(complaint)
        draft.flush()
        os.fsync(draft.fileno())
    part.rename(path)


def _read_all(
    file: RemoteFile, draft: BinaryIO, digests: "_Digests", count: Count, stop: threading.Event
) -> None:
    tries = 0
    while draft.tell() < file.num_bytes:
        before = draft.tell()
        try:
            for chunk in file.read(before):
                if stop.is_set():
                    raise Stopped
                if draft.tell() + len(chunk) > file.num_bytes:
                    raise ConfigError(f"{file.path} has more than the {file.num_bytes} bytes that it should")
                draft.write(chunk)
                digests.update(chunk)
                count(draft.tell())
            cause = "the connection was closed"
        except Interrupted as error:
            cause = str(error)
        reason = f"{file.path} ended after {draft.tell()} of {file.num_bytes} bytes ({cause})"
        tries = 0 if draft.tell() > before else tries + 1
        if draft.tell() == file.num_bytes:
            return
        if tries == _TRIES:
            raise ConfigError(f"{reason}. What has come stays: pull again to go on")
        _log.warning("%s; tries again", reason)
        if stop.wait(_FIRST_WAIT_S * 2**tries):
            raise Stopped


class _Digests:
    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        named = ((file.sha256, hashlib.sha256), (file.git_sha1, _git_sha1(file.num_bytes)))
        self._made: list[tuple[str, Any]] = [(stated, make()) for stated, make in named if stated]

    def update(self, chunk: bytes) -> None:
        for _, digest in self._made:
            digest.update(chunk)

    def update_from(self, draft: BinaryIO, stop: threading.Event) -> None:
        """Read what there is, up to its end."""
        while chunk := draft.read(_CHUNK):
            if stop.is_set():
                raise Stopped
            self.update(chunk)

    @property
    def complaint(self) -> str:
        for stated, digest in self._made:
            if digest.hexdigest() != stated.lower():
                return (
                    f"{self._file.path} has the digest {digest.hexdigest()} and should have {stated}: it is removed. "
                    f"Pull again, and if that does not help, the place has a damaged file"
                )
        return ""


def _git_sha1(num_bytes: int) -> Callable[[], Any]:
    """Return how a digest of git's begins: with the kind and size of an object."""
    return lambda: hashlib.sha1(f"blob {num_bytes}\0".encode(), usedforsecurity=False)


def _check_within(folder: Path, path: Path) -> None:
    """Raise ConfigError where a link leads out of the model's folder."""
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{path} leads out of the cache")

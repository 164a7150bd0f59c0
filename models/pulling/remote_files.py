"""A file of a model that is somewhere else, and which of a place's files a model needs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import NoReturn

from core.errors import ConfigError
from models.files.hub import IGNORED, PATTERNS

Read = Callable[[int], Iterator[bytes]]
"""An offset -> the bytes from there on. Raises Interrupted, and ConfigError."""


class Interrupted(Exception):
    """A connection that ended too early. The next one may go on where it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    path: str
    num_bytes: int
    version: str
    """Another one where the content is another one."""
    read: Read
    sha256: str = ""
    git_sha1: str = ""
    """What git calls the content. Of small files a hub knows no other digest."""

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}" if self.sha256 else f"version:{self.version}"


def needed(where: str, files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Return the files that a model is loaded from. Raises ConfigError where they are no model, or could be written elsewhere."""
    found = [file for file in files if _is_needed(file.path)]
    for file in found:
        _check_path(where, file.path)
    if not any(file.path.endswith(".safetensors") for file in found):
        _refuse(where, [file.path for file in files if file.path.endswith(".gguf")])
    return found


def _is_needed(path: str) -> bool:
    def fits(patterns: Sequence[str]) -> bool:
        return any(fnmatch(path, pattern) for pattern in patterns)

    return fits(PATTERNS) and not fits(IGNORED)


def _refuse(where: str, gguf: Sequence[str]) -> NoReturn:
    if gguf:
        raise ConfigError(f"{where} has GGUF files: pull one of them by its URL ({', '.join(gguf[:8])})")
    raise ConfigError(f"{where} has no safetensors files")


def _check_path(where: str, path: str) -> None:
    parts = PurePosixPath(path).parts
    plain = path.isprintable() and "\\" not in path and "/".join(parts) == path
    if not plain or any(part.startswith(".") or part == "/" for part in parts):
        raise ConfigError(f"{where} has a file that is called {path!r}, which is not fetched")

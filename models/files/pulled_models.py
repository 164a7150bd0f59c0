"""The cache of pulled models: a folder for each, a record of it, and the locks of those that use it.

A model is in the cache once its record says that it is whole. Whoever loads it holds its lock, shared, until the process ends.
Whoever changes or removes it must hold that lock alone. A second lock keeps two pulls of one model apart."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from core.errors import ConfigError
from core.user_cache import user_cache
from core.whole_files import replace_file
from models.files.pulled_names import PulledName, pulled_name

_RECORD, _PULL, _USE = ".json", ".pull", ".use"
_TRIES, _POLL_S = 10, 0.02
_held: Final[dict[Path, int]] = {}
"""The locks of what this process has loaded, which it holds until it ends."""


class NotPulled(ConfigError):
    pass


class InUse(ConfigError):
    pass


class CacheFull(ConfigError):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    name: str
    revision: str
    """A digest of the list of files."""
    files: dict[str, str]
    """path -> version"""
    num_bytes: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    model: PulledModel
    num_bytes: int
    """What it takes of the disk now."""
    used_at: float
    is_used: bool


class PulledModels:
    def __init__(self, root: Path | None = None) -> None:
        self.root = models_folder() if root is None else root

    def folder(self, name: PulledName) -> Path:
        return self.root / name.key

    def found(self, given: str) -> Path | None:
        """Return where a whole model is, and have it stay there until this process ends. None where it is not in the cache."""
        if (name := pulled_name(given)) is None or not (lock := self._path(name, _USE)).exists():
            return None
        if lock not in _held:
            descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            model = self.record(name) if _locks_soon(descriptor, fcntl.LOCK_SH) else None
            if model is None or not model.is_whole:
                os.close(descriptor)
                return None
            _held[lock] = descriptor
        with suppress(OSError):  # the cache may be read-only
            os.utime(self._path(name, _RECORD))
        folder = self.folder(name)
        files = [*folder.glob("*.gguf")]
        return files[0] if len(files) == 1 and not (folder / "config.json").exists() else folder

    def record(self, name: PulledName) -> PulledModel | None:
        return _record_at(self._path(name, _RECORD))

    def write(self, name: PulledName, model: PulledModel) -> None:
        """Raises OSError."""
        replace_file(self._path(name, _RECORD), json.dumps(asdict(model), indent=1).encode())

    def cached(self) -> list[CachedModel]:
        """Return all models, also those that are not whole, the most recently used first."""
        found: list[CachedModel] = []
        for path in self.root.glob(f"*{_RECORD}"):
            with suppress(OSError):
                model = _record_at(path)
                if model is not None and (name := pulled_name(model.name)) is not None:
                    used_at, size = path.stat().st_mtime, _size_of(self.folder(name))
                    found.append(
                        CachedModel(model=model, num_bytes=size, used_at=used_at, is_used=self._is_used(name))
                    )
        return sorted(found, key=lambda each: -each.used_at)

    @contextmanager
    def pulling(self, name: PulledName, *, waits: bool) -> Generator[None]:
        """Keep others from pulling or removing a model. Raises InUse where another one does and this one does not wait."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self._locked(name, _PULL, waits=waits) as is_ours:
            if not is_ours:
                raise InUse(f"{name.text} is being pulled or removed by another process")
            yield

    @contextmanager
    def changing(self, name: PulledName) -> Generator[None]:
        """Keep others from loading a model. Raises InUse where one has."""
        with self._locked(name, _USE, waits=False) as is_ours:
            if not is_ours:
                raise InUse(f"{name.text} is being served or loaded on this host: stop that first")
            yield

    def remove(self, given: str) -> int:
        """Remove a model, whole or not. Returns the bytes that it had. Raises NotPulled and InUse."""
        name = pulled_name(given)
        if name is None or not self._path(name, _RECORD).exists():
            raise NotPulled(
                f"there is no pulled model {given!r} on this host (`baton models cached` lists them)"
            )
        with self.pulling(name, waits=False), self.changing(name):
            size = _size_of(self.folder(name))
            self.forget(name)
            return size

    def forget(self, name: PulledName) -> None:
        """Remove the files of a model whose locks are held. Raises OSError."""
        if (model := self.record(name)) is not None and model.is_whole:
            # A kill must not leave a part that passes for the whole.
            self.write(name, replace(model, is_whole=False))
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder(name))
        self._path(name, _RECORD).unlink(missing_ok=True)

    def make_room(self, name: PulledName, num_bytes: int, limit: int) -> list[CachedModel]:
        """Have the cache with a model of so many bytes take at most `limit`: remove others that nobody uses, the least recently
        used first. Returns them. Raises CacheFull, and removes nothing, where that is not enough."""
        others = [each for each in self.cached() if each.model.name != name.text]
        excess = sum(each.num_bytes for each in others) + num_bytes - limit
        unused = [each for each in reversed(others) if not each.is_used]
        if excess > sum(each.num_bytes for each in unused):
            raise CacheFull(
                f"{name.text} needs {num_bytes} bytes, and the cache may have {limit} (--max-bytes, BATON_CACHE_BYTES), of which "
                f"models that are in use take {sum(each.num_bytes for each in others if each.is_used)}"
            )
        removed: list[CachedModel] = []
        for each in unused:
            if excess <= 0:
                break
            with suppress(InUse, NotPulled):
                excess -= self.remove(each.model.name)
                removed.append(each)
        if excess > 0:
            raise CacheFull(f"{name.text} has no room in the cache: others have just been taken into use")
        return removed

    def _is_used(self, name: PulledName) -> bool:
        with self._locked(name, _USE, waits=False) as is_ours:
            return not is_ours

    def _path(self, name: PulledName, suffix: str) -> Path:
        return self.root / f"{name.key}{suffix}"

    @contextmanager
    def _locked(self, name: PulledName, suffix: str, *, waits: bool) -> Generator[bool]:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path(name, suffix), flags, 0o644)
        try:
            yield _locks(descriptor, fcntl.LOCK_EX, waits=waits)
        finally:
            os.close(descriptor)


def models_folder() -> Path:
    """Return the cache's folder: BATON_CACHE_DIR, else beside the hub's files where HF_HOME says so, else in the user's cache."""
    if folder := os.environ.get("BATON_CACHE_DIR"):
        return Path(folder).expanduser()
    if folder := os.environ.get("HF_HOME"):
        return Path(folder).expanduser() / "baton-models"
    return user_cache() / "models"


def _record_at(path: Path) -> PulledModel | None:
    try:
        return PulledModel(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _locks(descriptor: int, kind: int, *, waits: bool = False) -> bool:
    try:
        fcntl.flock(descriptor, kind if waits else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locks_soon(descriptor: int, kind: int) -> bool:
    """Lock, also where another process looks this moment whether anybody does."""
    for _ in range(_TRIES):
        if _locks(descriptor, kind):
            return True
        time.sleep(_POLL_S)
    return False


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

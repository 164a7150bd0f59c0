"""Pulls one model: lists its files, makes room, fetches and checks them, and records that it is whole.

Two pulls of a model do the work once, since the second waits for the first. What a pull that was killed has fetched, the next
one goes on with."""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from core.errors import ConfigError
from core.whole_files import is_full
from models.files.pulled_models import CacheFull, PulledModel, PulledModels
from models.files.pulled_names import PulledName, pulled_name
from models.pulling.buckets import files_of_bucket
from models.pulling.download import bytes_there, fetch, part_of
from models.pulling.http_files import file_of_url, make_client
from models.pulling.hubs import files_of_hub, files_of_modelscope
from models.pulling.remote_files import Interrupted, RemoteFile, needed

_AT_ONCE: Final = 8
_TELL_EVERY_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    status: str
    path: str = ""
    digest: str = ""
    total: int = 0
    completed: int = 0

    @property
    def as_ollamas(self) -> dict[str, Any]:
        """A line of Ollama's /api/pull."""
        if not self.path:
            return {"status": self.status}
        counted = {"digest": self.digest, "total": self.total, "completed": self.completed}
        return {"status": self.status, **counted}


Tell = Callable[[PullProgress], None]


class Pull:
    def __init__(
        self,
        models: PulledModels,
        tell: Tell,
        *,
        max_bytes: int | None = None,
        sha256: str = "",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`max_bytes`: what the cache may take; None: as BATON_CACHE_BYTES says. `sha256`: the digest that the file of a URL must
        have. `transport`: the way to the hosts of URLs."""
        self._models, self._tell, self._sha256 = models, tell, sha256
        self._limit = cache_limit() if max_bytes is None else max_bytes
        self._transport, self._stop, self._lock = transport, threading.Event(), threading.Lock()

    def run(self, given: str) -> Path:
        """Return the model's folder once it is whole. Raises ConfigError, and Stopped after `stop`."""
        name = _named(given, self._sha256)
        try:
            with make_client(self._transport) as client, self._models.pulling(name, waits=True):
                self._tell(PullProgress(status="pulling manifest"))
                files = _listed(client, name, self._sha256)
                if not self._is_there(name, files):
                    with self._models.changing(name):
                        self._make(name, files)
                self._tell(PullProgress(status="success"))
        except Interrupted as error:
            raise ConfigError(f"{name.text} cannot be listed: {error}") from None
        except OSError as error:
            raise ConfigError(f"{name.text} cannot be stored in {self._models.root}: {error}") from None
        return self._models.folder(name)

    def stop(self) -> None:
        """Have `run` end soon. What it has fetched stays."""
        self._stop.set()

    def _is_there(self, name: PulledName, files: Sequence[RemoteFile]) -> bool:
        there = self._models.record(name)
        return there is not None and there.is_whole and there.revision == _revision_of(files)

    def _make(self, name: PulledName, files: Sequence[RemoteFile]) -> None:
        folder = self._models.folder(name)
        if folder.is_symlink():
            raise ConfigError(f"{folder} is a link: remove it")
        self._drop_stale(name, files)
        self._make_room(name, files)
        record = PulledModel(
            name=name.text,
            revision=_revision_of(files),
            files={file.path: file.version for file in files},
            num_bytes=sum(file.num_bytes for file in files),
            is_whole=False,
        )
        try:
            self._models.write(name, record)
            self._fetch_all(folder, files)
            self._tell(PullProgress(status="verifying sha256 digest"))
            shutil.rmtree(folder / ".parts", ignore_errors=True)
            self._tell(PullProgress(status="writing manifest"))
            self._models.write(name, replace(record, is_whole=True))
        except OSError as error:
            if not is_full(error):
                raise
            self._models.forget(name)
            raise CacheFull(
                f"the disk of {self._models.root} is full, and nothing of {name.text} is left on it: it has "
                f"{record.num_bytes} bytes"
            ) from None

    def _drop_stale(self, name: PulledName, files: Sequence[RemoteFile]) -> None:
        """Remove files of another version, and what no list has."""
        folder, old = self._models.folder(name), self._models.record(name)
        versions = old.files if old else {}
        current = {file.path for file in files if versions.get(file.path) == file.version}
        parts = {part_of(folder, file) for file in files}
        if old and old.is_whole:
            self._models.write(name, replace(old, is_whole=False))
        for path in folder.rglob("*"):
            is_kept = path in parts or path.relative_to(folder).as_posix() in current
            if path.is_symlink() or (path.is_file() and not is_kept):
                path.unlink()

    def _make_room(self, name: PulledName, files: Sequence[RemoteFile]) -> None:
        """Raise CacheFull, before anything is fetched, where there is none."""
        folder, total = self._models.folder(name), sum(file.num_bytes for file in files)
        if self._limit is not None:
            for gone in self._models.make_room(name, total, self._limit):
                self._tell(PullProgress(status=f"removed {gone.model.name}, the least recently used"))
        missing = total - sum(bytes_there(folder, file) for file in files)
        if missing > (free := shutil.disk_usage(self._models.root).free):
            raise CacheFull(
                f"{name.text} needs {missing} more bytes, and the disk of {self._models.root} has {free} free"
            )

    def _fetch_all(self, folder: Path, files: Sequence[RemoteFile]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            largest_first = sorted(files, key=lambda file: -file.num_bytes)
            jobs = [
                threads.submit(fetch, file, folder, self._counter(file), self._stop) for file in largest_first
            ]
            try:
                done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            finally:  # also where Ctrl-C has ended the waiting
                if not all(job.done() for job in jobs):
                    self._stop.set()
                    threads.shutdown(cancel_futures=True)
            for job in done:
                job.result()

    def _counter(self, file: RemoteFile) -> Callable[[int], None]:
        told_at = 0.0

        def count(completed: int) -> None:
            nonlocal told_at
            now = time.monotonic()
            if completed == file.num_bytes or now - told_at >= _TELL_EVERY_S:
                told_at = now
                short = file.digest.partition(":")[2][:12]
                with self._lock:
                    self._tell(
                        PullProgress(
                            status=f"pulling {short}",
                            path=file.path,
                            digest=file.digest,
                            total=file.num_bytes,
                            completed=completed,
                        )
                    )

        return count


def cache_limit() -> int | None:
    """Return what BATON_CACHE_BYTES says; None where there is no limit. Raises ConfigError."""
    given = os.environ.get("BATON_CACHE_BYTES", "")
    return read_bytes(given, "BATON_CACHE_BYTES") if given else None


def read_bytes(given: str, where: str) -> int:
    """Read a number of bytes: 500000000000, 500G, 0.5TB. Raises ConfigError."""
    try:
        return TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(given.strip())
    except ValidationError:
        raise ConfigError(f"{where} is {given!r}: give bytes, such as 500G") from None


def _named(given: str, sha256: str) -> PulledName:
    if (name := pulled_name(given)) is None:
        raise ConfigError(
            f"{given!r} cannot be pulled: give owner/name or owner/name@revision of the hub, modelscope://owner/name, a prefix "
            "such as s3://bucket/folder, or the URL of a .gguf file without a query"
        )
    if sha256 and not name.path.endswith(".gguf"):
        raise ConfigError("--sha256 is of one file: the hubs state the digests of theirs")
    return name


def _listed(client: httpx.Client, name: PulledName, sha256: str) -> list[RemoteFile]:
    match name.place:
        case "hub":
            return needed(name.text, files_of_hub(client, name))
        case "modelscope":
            return needed(name.text, files_of_modelscope(client, name))
        case "bucket":
            files = files_of_bucket(name, sha256)
            return files if name.path.endswith(".gguf") else needed(name.text, files)
        case "url":
            return [file_of_url(client, name, sha256)]


def _revision_of(files: Sequence[RemoteFile]) -> str:
    lines = sorted(f"{file.path}\n{file.num_bytes}\n{file.version}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

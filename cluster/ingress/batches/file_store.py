"""Files that clients upload, and those that batches answer with: contents and descriptions, in one folder.

Invariant: a file exists for clients once its description does, which is written last and atomically."""

import json
import re
import threading
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.ingress.tenants.api_keys import may_see
from core.errors import RequestError
from core.whole_files import remove_abandoned, replace_file

_UPLOAD = ".upload"
"""The end of a file's name while it comes in."""
_LEAST_BYTES = 4096
_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    id: str
    tenant: str
    """Its owner: a tenant, or a key that belongs to none."""
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def public(self) -> dict[str, Any]:
        described = asdict(self)
        del described["tenant"]
        return {"object": "file", **described, "status": "processed"}


class FileStore:
    """Every method blocks for as long as the disk takes."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self._folder, self._capacity = folder / "files", capacity_bytes
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_abandoned(self._folder)
        remove_abandoned(self._folder, _UPLOAD)
        self._lock = threading.Lock()
        self._announced: dict[str, int] = {}
        """What the uploads that are running here will have, by file."""

    def new_id(self) -> str:
        return f"file-{uuid.uuid4().hex}"

    def path(self, file_id: str) -> Path:
        """Return where the contents are. `file_id` is one of ours."""
        return self._folder / f"{file_id}.data"

    def begin(self, file_id: str, num_bytes: int) -> "Upload":
        """Begin a file that has about `num_bytes`. Raises RequestError where there is no room for it."""
        paths = [*self._folder.glob("*.data"), *self._folder.glob("*" + _UPLOAD)]
        with self._lock:
            used = sum(_size(path) for path in paths if path.stem not in self._announced)
            needed = max(_LEAST_BYTES, num_bytes)
            if used + sum(self._announced.values()) + needed > self._capacity:
                raise RequestError(
                    f"the file's {num_bytes} bytes exceed what is left of the {self._capacity} that this server keeps: delete "
                    "some",
                    field="file",
                    status=413,
                )
            self._announced[file_id] = needed
        return Upload(self, file_id, self._folder / f"{file_id}{_UPLOAD}")

    def end(self, file_id: str) -> None:
        """Forget the room that an upload was given."""
        self._announced.pop(file_id, None)

    def describe(self, file: StoredFile) -> None:
        """Write the description, so that clients see the file. Its contents are in place."""
        replace_file(self._folder / f"{file.id}.json", json.dumps(asdict(file)).encode())

    def get(self, file_id: str, tenant: str, field: str | None = None) -> StoredFile:
        """Return a file's description. Raises RequestError for what is not there, or another tenant's."""
        file = self._read(self._folder / f"{file_id}.json") if _ID.fullmatch(file_id) else None
        if file is None or not may_see(tenant, file.tenant):
            raise RequestError(
                f"there is no file {file_id!r}", field=field, status=404 if field is None else 400
            )
        return file

    def of(self, tenant: str) -> list[StoredFile]:
        """Return a tenant's files, the newest first."""
        found = [
            file
            for path in self._folder.glob("*.json")
            if (file := self._read(path)) and may_see(tenant, file.tenant)
        ]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def delete(self, file_id: str, tenant: str) -> None:
        """Delete a file. Raises RequestError."""
        self.get(file_id, tenant)
        for suffix in ("json", "data"):
            (self._folder / f"{file_id}.{suffix}").unlink(missing_ok=True)

    def _read(self, path: Path) -> StoredFile | None:
        try:
            return StoredFile(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None


def _size(path: Path) -> int:
    """Return what a file takes of the room: an empty one has a description, too."""
    try:
        return max(_LEAST_BYTES, path.stat().st_size)
    except FileNotFoundError:  # it was deleted, or an upload has ended
        return 0


class Upload:
    """A file that comes in. A context manager: what was not kept at its end is removed."""

    def __init__(self, store: FileStore, file_id: str, path: Path) -> None:
        self._store, self._id, self._path = store, file_id, path
        self._file = path.open("xb", buffering=0)
        self.num_bytes = 0

    def __enter__(self) -> "Upload":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def drop(self) -> None:
        """Remove what was not kept."""
        self._file.close()
        self._path.unlink(missing_ok=True)
        self._store.end(self._id)

    def write(self, piece: bytes) -> None:
        """Raises OSError where the disk has no room."""
        left = memoryview(piece)
        while left:
            left = left[self._file.write(left) :]
        self.num_bytes += len(piece)

    def keep(self, file: StoredFile) -> StoredFile:
        """Let clients see it."""
        target = self._store.path(self._id)
        self._path.rename(target)
        try:
            self._store.describe(file)
        except OSError:
            target.unlink(missing_ok=True)
            raise
        return file

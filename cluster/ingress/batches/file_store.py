"""Files that clients upload, and those that batches answer with: contents and descriptions, in one folder.

Invariant: a file exists for clients once its description does, which is written last and atomically."""

import json
import os
import re
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cluster.ingress.api.api_keys import may_see
from core.errors import RequestError

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

    def new_id(self) -> str:
        return f"file-{uuid.uuid4().hex}"

    def path(self, file_id: str) -> Path:
        """Return where the contents are. `file_id` is one of ours."""
        return self._folder / f"{file_id}.data"

    def add(self, source: BinaryIO, file: StoredFile) -> StoredFile:
        """Copy `source` in. Raises RequestError where there is no room."""
        used = sum(path.stat().st_size for path in self._folder.glob("*.data"))
        if used + file.bytes > self._capacity:
            raise RequestError(
                f"the file's {file.bytes} bytes exceed what is left of the {self._capacity} that this server keeps: delete some",
                field="file",
                status=413,
            )
        path = self.path(file.id)
        try:
            with path.open("xb") as target:
                shutil.copyfileobj(source, target)
            self.describe(file)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return file

    def describe(self, file: StoredFile) -> None:
        """Write the description, so that clients see the file. Its contents are in place."""
        write_json(self._folder / f"{file.id}.json", asdict(file))

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


def write_json(path: Path, content: Any) -> None:
    """Write a file completely or not at all, also where the machine crashes meanwhile."""
    draft = path.with_suffix(f".{uuid.uuid4().hex}.new")
    with draft.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)

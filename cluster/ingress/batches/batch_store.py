"""Batches as they are on the disk. The process that holds a batch's lock runs it, and the lock ends with the process.

Invariant: only the holder of the lock writes a batch's record. Others ask it to stop by leaving a mark."""

import fcntl
import json
import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from cluster.ingress.tenants.api_keys import may_see
from core.errors import RequestError
from core.whole_files import remove_abandoned, replace_file

Record = dict[str, Any]
"""OpenAI's batch object, with its owner under `tenant`."""
FINAL = ("completed", "failed", "expired", "cancelled")
_ID = re.compile(r"batch_[0-9a-f]{32}")


class BatchStore:
    """Every method blocks for as long as the disk takes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "batches"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_abandoned(self._folder)
        self._ended: set[str] = set()

    def new_id(self) -> str:
        return f"batch_{uuid.uuid4().hex}"

    def save(self, record: Record) -> None:
        replace_file(self._folder / f"{record['id']}.json", json.dumps(record).encode())

    def get(self, batch_id: str, tenant: str) -> Record:
        """Return a batch. Raises RequestError for what is not there, or another tenant's."""
        record = self.load(batch_id) if _ID.fullmatch(batch_id) else None
        if record is None or not may_see(tenant, record["tenant"]):
            raise RequestError(f"there is no batch {batch_id!r}", status=404)
        return record

    def load(self, batch_id: str) -> Record | None:
        """Return a batch as clients see it: one that is asked to stop is already stopping."""
        try:
            record: Record = json.loads((self._folder / f"{batch_id}.json").read_bytes())
        except FileNotFoundError:
            return None
        if record["status"] not in FINAL and (asked_at := self.cancel_asked_at(batch_id)) is not None:
            record |= {"status": "cancelling", "cancelling_at": asked_at}
        return record

    def of(self, tenant: str) -> list[Record]:
        """Return a tenant's batches, the newest first."""
        found = [record for path in self._folder.glob("*.json") if (record := self.load(path.stem))]
        own = [record for record in found if may_see(tenant, record["tenant"])]
        return sorted(own, key=lambda record: (record["created_at"], record["id"]), reverse=True)

    def num_unfinished(self, tenant: str) -> int:
        return sum(record["status"] not in FINAL for record in self.of(tenant))

    def unfinished(self) -> list[Record]:
        """Return the unfinished batches, the oldest first."""
        found: list[Record] = []
        for path in self._folder.glob("*.json"):
            if path.stem in self._ended or (record := self.load(path.stem)) is None:
                continue
            if record["status"] in FINAL:
                self._ended.add(path.stem)
            else:
                found.append(record)
        return sorted(found, key=lambda record: record["created_at"])

    def ask_to_cancel(self, batch_id: str) -> None:
        (self._folder / f"{batch_id}.cancel").touch()

    def cancel_asked_at(self, batch_id: str) -> int | None:
        with suppress(FileNotFoundError):
            return int((self._folder / f"{batch_id}.cancel").stat().st_mtime)
        return None

    def claim(self, batch_id: str) -> IO[bytes] | None:
        """Claim a batch until the returned file is closed. Returns None while another process runs it."""
        lock = (self._folder / f"{batch_id}.lock").open("ab", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        return lock

"""Files that clients upload, and those that batches answer with: a record each, whose children are the contents.

Invariant: a file exists for clients once its record is whole. Until then it is a draft, which is deleted if nobody ends it."""

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster.ingress.tenants.api_keys import may_see, visible_owners
from cluster.store.store_port import Bound, LeaseLost, NoRoom, Store, StoreRecord
from core.errors import RequestError

PIECE_BYTES = 1 << 20
"""The most of an upload that one record has."""
KIND, WHOLE, DRAFT = "file", "", "draft"
_LEAST_BYTES = 4096
"""What a file takes of the room at the least: an empty one has a description, too."""
_DRAFT_S = 3600.0
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
    def __init__(self, store: Store, capacity_bytes: int) -> None:
        self._store, self._capacity = store, capacity_bytes

    def new_id(self) -> str:
        return f"file-{uuid.uuid4().hex}"

    def upload(self, file_id: str, owner: str, num_bytes: int) -> "Upload":
        """Return an upload of about `num_bytes`, to be entered."""
        return Upload(self._store, draft_of(file_id, owner, num_bytes), self._capacity)

    async def get(self, file_id: str, owner: str, field: str | None = None) -> StoredFile:
        """Return a file's description. Raises RequestError for what is not there, or another tenant's."""
        found = await self._store.get(file_id) if _ID.fullmatch(file_id) else None
        if found is None or found.state != WHOLE or not may_see(owner, found.owner):
            raise RequestError(
                f"there is no file {file_id!r}", field=field, status=404 if field is None else 400
            )
        return _described(found)

    async def of(self, owner: str) -> list[StoredFile]:
        """Return an owner's files, the newest first."""
        found = await self._store.find(KIND, owners=visible_owners(owner), state=WHOLE)
        return [_described(record) for record in found]

    async def delete(self, file_id: str, owner: str) -> None:
        """Delete a file. Raises RequestError."""
        await self.get(file_id, owner)
        await self._store.delete(file_id)

    async def contents(self, file_id: str) -> AsyncGenerator[bytes]:
        """Yield the contents of a file, or of a draft, piece by piece."""
        at = 0
        while pieces := [
            one for one in await self._store.children(file_id, at, PIECE_BYTES) if one.position >= at
        ]:
            for piece in pieces:
                yield piece.body
            at = pieces[-1].position + len(pieces[-1].body)

    async def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """Return a part of the contents. Raises RequestError where the file was deleted."""
        pieces = await self._store.children(file_id, offset, num_bytes)
        if not pieces:
            raise RequestError(f"the file {file_id} was deleted")
        start = offset - pieces[0].position
        return b"".join(piece.body for piece in pieces)[start : start + num_bytes]


class Upload:
    """A file that comes in, piece by piece. What was not kept at its end is removed."""

    def __init__(self, store: Store, draft: StoreRecord, capacity_bytes: int) -> None:
        self._store, self._draft, self._capacity = store, draft, capacity_bytes
        self._unsaved, self._num_saved, self._is_kept = bytearray(), 0, False

    @property
    def num_bytes(self) -> int:
        return self._num_saved + len(self._unsaved)

    async def __aenter__(self) -> "Upload":
        """Raises RequestError where there is no room for it."""
        bound = Bound(kind=KIND, num_bytes=self._capacity, makes_room=False)
        try:
            await self._store.put([self._draft], bound=bound)
        except NoRoom:
            raise RequestError(
                f"the file's {self._draft.num_bytes} bytes exceed what is left of the {self._capacity} that this server keeps: "
                "delete some",
                field="file",
                status=413,
            ) from None
        except BaseException:
            await self._drop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_kept:
            await self._drop()

    def write(self, piece: bytes) -> None:
        """Take a piece. It is in memory until `save`."""
        self._unsaved += piece

    async def save(self, *, all_of_it: bool = False) -> None:
        """Store what was taken; unless `all_of_it`, whole pieces alone."""
        while len(self._unsaved) >= PIECE_BYTES or (all_of_it and self._unsaved):
            piece = bytes(self._unsaved[:PIECE_BYTES])
            await self._store.put([piece_of(self._draft.id, self._num_saved, piece)])
            self._num_saved += len(piece)
            del self._unsaved[:PIECE_BYTES]

    async def keep(self, file: StoredFile) -> StoredFile:
        """Let clients see it. Raises LeaseLost where it took so long that the draft was deleted."""
        await self.save(all_of_it=True)
        # Nothing but its end writes a draft's record again.
        if not await self._store.replace(replace(whole_of(file), version=1)):
            raise LeaseLost(f"the upload of {file.id} took longer than {_DRAFT_S:.0f} s")
        self._is_kept = True
        return file

    async def _drop(self) -> None:
        await asyncio.shield(self._store.delete(self._draft.id))


def draft_of(file_id: str, owner: str, num_bytes: int, lives_s: float | None = _DRAFT_S) -> StoreRecord:
    """Return the record of a file that has no end yet."""
    room = max(_LEAST_BYTES, num_bytes)
    return StoreRecord(id=file_id, kind=KIND, owner=owner, state=DRAFT, num_bytes=room, lives_s=lives_s)


def piece_of(file_id: str, position: int, body: bytes) -> StoreRecord:
    return StoreRecord(id=f"{file_id}/{position}", kind="piece", parent=file_id, position=position, body=body)


def whole_of(file: StoredFile) -> StoreRecord:
    """Return the record of a file whose contents are stored."""
    body = json.dumps(asdict(file)).encode()
    room = max(_LEAST_BYTES, file.bytes)
    return StoreRecord(id=file.id, kind=KIND, owner=file.tenant, state=WHOLE, body=body, num_bytes=room)


def _described(record: StoreRecord) -> StoredFile:
    return StoredFile(**json.loads(record.body))

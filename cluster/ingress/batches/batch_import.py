"""Copies what an earlier release has kept in its folder, files and batches, into the store: once, in one of the ingresses."""

import asyncio
import json
import logging
from contextlib import suppress
from pathlib import Path

from cluster.ingress.batches.batch_lines import Json, answer_files
from cluster.ingress.batches.batch_store import FINAL, stored_batch
from cluster.ingress.batches.file_store import DRAFT, PIECE_BYTES, StoredFile, draft_of, piece_of, whole_of
from cluster.store.lease_keeper import LeaseKeeper
from cluster.store.store_port import Store, StoreRecord
from core.errors import StoreUnavailable

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_DONE = "done"


async def import_folder(store: Store, folder: str) -> None:
    """Import a folder unless that was done, or another ingress does it. Tries again while the store does not answer."""
    path = await asyncio.to_thread(_earlier_folder, folder)
    while path is not None:
        try:
            await _import_once(store, path)
            return
        except (StoreUnavailable, OSError) as error:
            log.error("serve.batch_dir: %s is not imported yet: %s", path, error)
            await asyncio.sleep(_AGAIN_S)


def _earlier_folder(folder: str) -> Path | None:
    path = Path(folder).expanduser()
    return path if folder and (path / "files").is_dir() else None


async def _import_once(store: Store, folder: Path) -> None:
    leases, mark = LeaseKeeper(store), StoreRecord(id=f"import {folder}", kind="import")
    if await store.get(mark.id) is None:
        await store.put([mark])
    claimed = await leases.claim(mark.id)
    if claimed is None or claimed.state == _DONE:
        return
    work = asyncio.create_task(_import(store, folder))
    leases.keep(mark.id, work)
    await work
    await store.put([StoreRecord(id=mark.id, kind=mark.kind, state=_DONE)], held=leases.held(mark.id))


async def _import(store: Store, folder: Path) -> None:
    """Import what the store does not have."""
    num_files = num_batches = 0
    for said in await asyncio.to_thread(_read_all, folder / "files"):
        file = StoredFile(**said)
        if not await _is_stored(store, file.id):
            await _copy(store, file.id, file.tenant, folder)
            await store.put([whole_of(file)])
            num_files += 1
    for batch in await asyncio.to_thread(_read_all, folder / "batches"):
        if not await _is_stored(store, batch["id"]):
            await _import_batch(store, folder, batch)
            num_batches += 1
    log.warning(
        "serve.batch_dir: %d files and %d batches were copied from %s into the store; nothing reads them there any more",
        num_files,
        num_batches,
        folder,
    )


async def _import_batch(store: Store, folder: Path, batch: Json) -> None:
    """Import a batch, and the answers that it has so far where it has not ended."""
    if batch["status"] not in FINAL:
        with suppress(FileNotFoundError):
            asked_at = int((folder / "batches" / f"{batch['id']}.cancel").stat().st_mtime)
            batch |= {"status": "cancelling", "cancelling_at": asked_at}
        for file_id in answer_files(batch["id"]):
            await _copy(store, file_id, batch["tenant"], folder, in_lines=True)
    await store.put([stored_batch(batch)])


async def _is_stored(store: Store, record_id: str) -> bool:
    found = await store.get(record_id)
    return found is not None and found.state != DRAFT


async def _copy(store: Store, file_id: str, owner: str, folder: Path, *, in_lines: bool = False) -> None:
    """Copy a file's contents. `in_lines`: without a last line that was not finished."""
    path = folder / "files" / f"{file_id}.data"
    if not path.exists():
        return
    contents = await asyncio.to_thread(path.read_bytes)
    if in_lines:
        contents = contents[: contents.rfind(b"\n") + 1]
    await store.put([draft_of(file_id, owner, len(contents), lives_s=None)])
    for at in range(0, len(contents), PIECE_BYTES):
        await store.put([piece_of(file_id, at, contents[at : at + PIECE_BYTES])])


def _read_all(folder: Path) -> list[Json]:
    """Return what the descriptions in a folder say, the oldest first."""
    found: list[Json] = []
    for path in folder.glob("*.json"):
        try:
            found.append(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            log.error("serve.batch_dir: %s cannot be read and is left out: %s", path, error)
    return sorted(found, key=lambda said: said["created_at"])

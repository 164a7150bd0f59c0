"""Files and batches of releases up to 0.2, which kept them in a folder, are in the store after a start: once, and whole."""

import asyncio
import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.ingress.batches.batch_import import import_folder
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.batches.test_batches import CHATS, Server, line, quickly

__all__ = ["quickly"]


class Earlier:
    """A folder as release 0.2 has left it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("files", "batches"):
            (folder / name).mkdir()

    def file(self, contents: bytes, owner: str = "") -> str:
        file_id = f"file-{uuid.uuid4().hex}"
        said = {
            "id": file_id,
            "tenant": owner,
            "filename": "x.jsonl",
            "purpose": "batch",
            "bytes": len(contents),
        }
        self._write(f"files/{file_id}.json", said | {"created_at": 1_700_000_000})
        (self.folder / f"files/{file_id}.data").write_bytes(contents)
        return file_id

    def batch(self, num_lines: int, **fields: Any) -> str:
        batch_id = f"batch_{uuid.uuid4().hex}"
        text = "\n".join(json.dumps(line(n)) for n in range(num_lines))
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        record = {
            "id": batch_id, "object": "batch", "endpoint": CHATS, "model": NAME, "errors": None,
            "input_file_id": self.file(text.encode()), "completion_window": "24h", "status": "in_progress",
            "output_file_id": None, "error_file_id": None, "created_at": 1_700_000_000, "expires_at": 1 << 40,
            **{f"{name}_at": None for name in names},
            "request_counts": {"total": num_lines, "completed": 0, "failed": 0}, "metadata": None, "tenant": "",
        }  # fmt: skip
        self._write(f"batches/{batch_id}.json", record | fields)
        (self.folder / f"batches/{batch_id}.lock").touch()
        return batch_id

    def answered(self, batch_id: str, num_lines: int) -> None:
        """Write the answers to the first lines, and a part of the next, as a killed process leaves them."""
        answers = [
            {"id": f"batch_req_{n}", "custom_id": f"c{n}", "response": "earlier"} for n in range(num_lines)
        ]
        path = self.folder / f"files/{batch_id.replace('batch_', 'file-')}.data"
        path.write_bytes(
            b"".join(json.dumps(each).encode() + b"\n" for each in answers) + b'{"custom_id": "c'
        )

    def _write(self, path: str, said: Any) -> None:
        (self.folder / path).write_text(json.dumps(said))


async def test_files_and_ended_batches_are_there_as_they_were(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path)
    contents = bytes(range(256)) * 9000
    file_id, ended = earlier.file(contents), earlier.batch(2, status="completed", completed_at=1_700_000_100)
    server = Server(tmp_path, FakeGenerator(), room=1 << 30)
    await import_folder(server.store, str(tmp_path))
    assert (await server.client.files.content(file_id)).content == contents
    assert (await server.client.files.retrieve(file_id)).created_at == 1_700_000_000
    found = await server.client.batches.retrieve(ended)
    assert (found.status, found.completed_at, found.created_at) == ("completed", 1_700_000_100, 1_700_000_000)


async def test_a_batch_that_had_begun_goes_on_after_the_answers_that_it_has(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path)
    batch_id = earlier.batch(10)
    earlier.answered(batch_id, 4)
    server = Server(tmp_path, FakeGenerator())
    await import_folder(server.store, str(tmp_path))
    async with server.running():
        ended = await server.ended(batch_id)
    answers = await server.answers(ended.output_file_id)
    assert Counter(each["custom_id"] for each in answers) == Counter(f"c{n}" for n in range(10))
    assert [each["response"] == "earlier" for each in answers].count(True) == 4
    assert len(server.generator.requests) == 6


async def test_a_batch_that_was_to_be_cancelled_is(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path)
    batch_id = earlier.batch(3)
    (tmp_path / f"batches/{batch_id}.cancel").touch()
    server = Server(tmp_path, FakeGenerator(pause_s=0.01))
    await import_folder(server.store, str(tmp_path))
    assert (await server.client.batches.retrieve(batch_id)).status == "cancelling"
    async with server.running():
        assert (await server.ended(batch_id)).status == "cancelled"


async def test_it_is_done_once_however_many_ingresses_start(tmp_path: Path) -> None:
    earlier = Earlier(tmp_path)
    file_id = earlier.file(b"x")
    servers = [Server(tmp_path, FakeGenerator()) for _ in range(3)]
    await asyncio.gather(*(import_folder(server.store, str(tmp_path)) for server in servers))
    await servers[0].client.files.delete(file_id)
    await import_folder(servers[1].store, str(tmp_path))
    with pytest.raises(openai.NotFoundError):
        await servers[0].client.files.retrieve(file_id)


async def test_what_cannot_be_read_is_said_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    earlier = Earlier(tmp_path)
    file_id = earlier.file(b"x")
    (tmp_path / "files" / "broken.json").write_text('{"id": "fil')
    server = Server(tmp_path, FakeGenerator())
    await import_folder(server.store, str(tmp_path))
    assert [file.id for file in (await server.client.files.list()).data] == [file_id]
    assert "broken.json cannot be read" in caplog.text


async def test_a_folder_without_files_is_nothing_to_import(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeGenerator())
    for folder in ("", str(tmp_path), str(tmp_path / "none")):
        await import_folder(server.store, folder)
    assert await server.store.find("import") == []

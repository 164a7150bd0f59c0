"""Batches of processes that stop in between, and of two at once."""

import asyncio
import io
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.batches import batch_job
from cluster.ingress.batches.file_store import FileStore, Upload
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.batches.test_batches import Server, line, quickly
from tests.patience import PATIENCE_S, until

__all__ = ["quickly"]


async def test_whoever_comes_next_goes_on_and_answers_no_line_twice(tmp_path: Path) -> None:
    """Each server ends in the midst of it; what a killed one had half written is cut off."""
    slow = [FakeGenerator(f"server {number}", pause_s=0.002) for number in range(6)]
    async with Server(tmp_path, slow[0]).running() as first:
        batch = await first.submit([line(n) for n in range(60)])
    seen = 0
    for number, generator in enumerate(slow, 1):
        async with Server(tmp_path, generator).running() as server:
            until = len(slow) == number
            while (found := await server.client.batches.retrieve(batch.id)).status != "completed":
                if not until and len(generator.finished) > 6:
                    break
                await asyncio.sleep(0.005)
            seen += len(generator.requests)
        path = tmp_path / "files" / f"{batch.id.replace('batch_', 'file-')}.data"
        if found.status != "completed":
            with path.open("ab") as file:
                file.write(b'{"custom_id": "c1", "resp')
    assert found.status == "completed"
    good = await server.answers(found.output_file_id)
    assert Counter(each["custom_id"] for each in good) == Counter(f"c{n}" for n in range(60))
    assert len({each["response"]["body"]["choices"][0]["message"]["content"] for each in good}) > 3
    assert seen > 60, "what was running when a server ended was asked again"


async def test_two_ingresses_do_not_run_the_same_batch(tmp_path: Path) -> None:
    one, other = (Server(tmp_path, FakeGenerator(pause_s=0.005)) for _ in range(2))
    batches = [await one.submit([line(n) for n in range(20)]) for _ in range(6)]
    async with one.running(), other.running():
        for batch in batches:
            assert (await other.ended(batch.id)).status == "completed"
    assert len(one.generator.requests) + len(other.generator.requests) == 120
    assert one.generator.requests
    assert other.generator.requests


async def test_a_batch_stopped_while_its_files_open_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, may_open, opened = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    class SlowFile(batch_job.AnswerFile):
        def __init__(self, path: Path) -> None:
            loop.call_soon_threadsafe(opening.set)
            assert may_open.wait(PATIENCE_S)
            super().__init__(path)
            opened.append(self)

    monkeypatch.setattr(batch_job, "AnswerFile", SlowFile)
    async with Server(tmp_path, FakeGenerator()).running() as server:
        await server.submit([line(1)])
        async with asyncio.timeout(PATIENCE_S):
            await opening.wait()
        loop.call_later(0.05, may_open.set)
    assert len(opened) == 2
    for file in opened:
        with pytest.raises(ValueError, match="closed"):
            file.sync()


def half_written(folder: Path) -> list[Path]:
    return list(folder.rglob("*.upload"))


@pytest.mark.parametrize("step", ["begin", "write", "keep"])
async def test_an_upload_that_is_cut_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    owner = FileStore if step == "begin" else Upload
    work = getattr(owner, step)

    def slowly(self: Any, *args: Any) -> Any:
        begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return work(self, *args)

    monkeypatch.setattr(owner, step, slowly)
    server = Server(tmp_path, FakeGenerator(), room=70_000)
    file = io.BytesIO(b"x" * 40_000)
    upload = asyncio.create_task(server.client.files.create(file=file, purpose="batch"))
    await until(begun.is_set)
    upload.cancel()
    await asyncio.sleep(0.02)
    may_go_on.set()
    await asyncio.gather(upload, return_exceptions=True)
    assert upload.cancelled()
    assert not half_written(tmp_path)
    monkeypatch.undo()
    if step != "keep":  # the client did not learn its id, but its file is whole
        assert await server.client.files.create(file=io.BytesIO(b"x" * 40_000), purpose="batch")

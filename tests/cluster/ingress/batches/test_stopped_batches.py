"""Batches of processes that stop in between, and of two at once."""

import asyncio
import io
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.batches.file_store import Upload
from cluster.store.store_port import Store, StoreRecord
from core.types import Request
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.batches.test_batches import Server, line, quickly
from tests.patience import PATIENCE_S, until

__all__ = ["quickly"]


async def test_whoever_comes_next_goes_on_and_answers_no_line_twice(tmp_path: Path) -> None:
    """Each server ends in the midst of it."""
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


class Taken(FakeGenerator):
    """Loses the batch that it runs to another ingress, while it answers."""

    def __init__(self, take: Callable[[], Awaitable[object]]) -> None:
        super().__init__("of one that has lost it")
        self._take = take

    async def generate(self, request: Request, shared: object = None):
        if not self.requests:
            await self._take()
        async for token in super().generate(request, shared):
            yield token


async def test_an_ingress_that_has_lost_a_batch_stores_no_answer_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was held up for longer than its lease, and another one has claimed the batch."""
    other = Server(tmp_path, FakeGenerator("of the other"))
    batch = await other.submit([line(n) for n in range(3)])
    held = False

    async def take() -> None:
        nonlocal held
        await other.store.renew([batch.id], one.runner.holder, -1.0)
        held = await other.store.claim(batch.id, other.runner.holder, 1000.0) is not None

    one = Server(tmp_path, Taken(take))
    async with one.running():
        await until(lambda: "goes on in another ingress" in caplog.text)
    assert held
    async with other.running():
        done = await other.ended(batch.id)
    answers = await other.answers(done.output_file_id)
    assert Counter(each["custom_id"] for each in answers) == Counter(f"c{n}" for n in range(3))
    said = {each["response"]["body"]["choices"][0]["message"]["content"] for each in answers}
    assert said == {"of the other"}


async def drafts(store: Store) -> list[StoreRecord]:
    return await store.find("file", state="draft")


@pytest.mark.parametrize("step", ["write", "keep"])
async def test_an_upload_that_is_cut_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    work: Any = getattr(Upload, step)

    def blocking(self: Any, *args: Any) -> Any:
        begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return work(self, *args)

    async def slowly(self: Any, *args: Any) -> Any:
        begun.set()
        await asyncio.sleep(PATIENCE_S)

    monkeypatch.setattr(Upload, step, {"write": blocking, "keep": slowly}[step])
    server = Server(tmp_path, FakeGenerator(), room=70_000)
    file = io.BytesIO(b"x" * 40_000)
    upload = asyncio.create_task(server.client.files.create(file=file, purpose="batch"))
    await until(begun.is_set)
    upload.cancel()
    await asyncio.sleep(0.02)
    may_go_on.set()
    await asyncio.gather(upload, return_exceptions=True)
    assert upload.cancelled()
    assert await drafts(server.store) == []
    monkeypatch.undo()
    assert await server.client.files.create(file=io.BytesIO(b"x" * 40_000), purpose="batch")

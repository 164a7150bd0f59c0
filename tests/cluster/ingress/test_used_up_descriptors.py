"""An ingress that has as many files open as it may refuses what needs one more, and says to try again."""

import asyncio
import contextlib
import io
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from cluster.store.sql_store import DOWN_S
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.batches.test_batches import Server


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                kept.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in kept:
            os.close(each)


async def test_an_upload_is_refused_and_may_be_tried_again(tmp_path: Path) -> None:
    first, server = Server(tmp_path / "first", FakeGenerator()), Server(tmp_path, FakeGenerator())
    await first.client.files.create(file=io.BytesIO(b"{}"), purpose="batch")  # everything is imported now
    with (
        no_descriptor_left(),
        pytest.raises(openai.InternalServerError, match="Too many open files") as refused,
    ):
        await server.client.files.create(file=io.BytesIO(b"{}"), purpose="batch")
    assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "1")
    await asyncio.sleep(DOWN_S)
    await server.client.files.create(file=io.BytesIO(b"{}"), purpose="batch")
    assert len((await server.client.files.list()).data) == 1

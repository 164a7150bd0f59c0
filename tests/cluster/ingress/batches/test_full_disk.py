"""Full disks, real ones: uploads are refused with a sentence, batches wait with what they have, and nothing is left behind."""

import asyncio
import io
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from cluster.ingress.batches import batch_job, batch_runner
from cluster.store.sql_database import RESERVED_BYTES
from core.whole_files import remove_abandoned, replace_file
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.batches.test_batches import Server, line
from tests.patience import until

DISK_BYTES = RESERVED_BYTES + (8 << 20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root mounts a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.01)
    monkeypatch.setattr(batch_job, "LOOK_S", 0.02)


def fill(disk: Path, left: int = 0) -> Path:
    """Leave no page, or so many bytes."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 65536)
        except OSError:
            pass
    os.truncate(filler, filler.stat().st_size - left)
    return filler


async def test_an_upload_that_does_not_fit_is_refused_with_a_sentence(disk: Path) -> None:
    server = Server(disk, FakeGenerator(), room=1 << 30)
    with pytest.raises(openai.InternalServerError, match="disk is full") as refused:
        await server.client.files.create(file=io.BytesIO(b"x" * (2 * DISK_BYTES)), purpose="batch")
    error = refused.value
    assert (error.status_code, error.code, error.response.headers["x-should-retry"]) == (
        507,
        "insufficient_storage",
        "false",
    )
    assert await server.store.find("file") == []
    kept = await server.client.files.create(file=io.BytesIO(b"x" * 4096), purpose="batch")
    assert kept.bytes == 4096


async def test_whatever_is_stored_there_is_refused_so(disk: Path) -> None:
    server = Server(disk, FakeGenerator())
    file = await server.client.files.create(file=io.BytesIO(b"{}"), purpose="batch")
    fill(disk)
    for work in (
        server.client.files.create(file=io.BytesIO(b"{}"), purpose="batch"),
        server.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.InternalServerError, match="disk is full"):
            await work
    assert [record.id for record in await server.store.find("file")] == [file.id]
    assert await server.store.find("batch") == []


async def test_a_batch_waits_for_room_and_answers_each_line_once(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = FakeGenerator()
    server = Server(disk, generator)
    batch = await server.submit([line(number) for number in range(20)])
    filler = fill(disk, 2 << 20)
    with caplog.at_level(logging.ERROR):
        async with server.running():
            await until(lambda: "waits for the store" in caplog.text)
            await asyncio.sleep(0.3)  # some looks
            num_run = len(generator.requests)
            assert num_run <= 4, "what was computed is kept, and not computed again at each look"
            filler.unlink()
            ended = await server.ended(batch.id)
    assert ended.request_counts is not None
    assert (ended.status, ended.request_counts.completed) == ("completed", 20)
    assert len(generator.requests) == 20
    assert caplog.text.count("waits for the store") <= 2


async def test_a_disk_that_fills_up_in_between_loses_nothing(disk: Path) -> None:
    generator = FakeGenerator(pause_s=0.002)
    server = Server(disk, generator)
    batch = await server.submit([line(number) for number in range(40)])
    async with server.running():
        await until(lambda: len(generator.finished) >= 4)
        filler = fill(disk, 2 << 20)
        await asyncio.sleep(0.3)
        filler.unlink()
        ended = await server.ended(batch.id)
    assert ended.request_counts is not None
    assert (ended.status, ended.request_counts.completed) == ("completed", 40)
    assert len(generator.requests) == 40
    assert ended.output_file_id is not None
    answers = (await server.client.files.content(ended.output_file_id)).text.splitlines()
    assert len(answers) == 40


async def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeGenerator())
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    form = {"content-type": "multipart/form-data; boundary=b"}
    for body in (head + b"half of it", head + b"whole\r\n--b--\r\n"):  # the second names no purpose
        answer = await server.http.post("/v1/files", content=body, headers=form)
        assert answer.status_code == 400
        assert await server.store.find("file") == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"--b\r\nX: " + b"x" * 10_000, "header"),
        (b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 2000, "more than 1024"),
        (b'--b\r\nContent-Disposition: form-data; name="p"\r\n\r\nx\r\n' * 20, "more than 8 parts"),
        (b'--b\r\nContent-Disposition: form-data; name="f"; filename="x"\r\n\r\n', "one file"),
    ],
)
async def test_a_form_is_no_longer_than_it_must_be(body: bytes, said: str, tmp_path: Path) -> None:
    server = Server(tmp_path, FakeGenerator())
    form = {"content-type": "multipart/form-data; boundary=b"}
    answer = await server.http.post("/v1/files", content=body, headers=form)
    assert answer.status_code == 400
    assert said in answer.text


def test_a_file_is_replaced_whole_or_not_at_all(disk: Path) -> None:
    path = disk / "list.json"
    replace_file(path, b"old")
    fill(disk)
    with pytest.raises(OSError, match="space"):
        replace_file(path, b"x" * 8192)
    assert path.read_bytes() == b"old"
    assert sorted(each.name for each in disk.iterdir()) == ["filler", "list.json"]


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    for name, age_s in (("a.json.1.new", 7200), ("b.json.2.new", 10), ("c.json", 7200)):
        path = tmp_path / name
        path.write_bytes(b"")
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json.2.new", "c.json"]

"""The disk tier against damage, a full disk, another model's file, and a restart."""

import asyncio
import errno
import os
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError
from engine.tiers import disk_tier
from engine.tiers.disk_tier import DiskTier
from engine.tiers.reads_first import ReadsFirst
from tests.patience import PATIENCE_S

BLOCK = 5000
MODEL = b"model".ljust(16)


def digest(i: int) -> bytes:
    return i.to_bytes(16, "little")


def content(i: int) -> bytes:
    return bytes([i % 256]) * BLOCK


@pytest.fixture
def open_tier(tmp_path: Path):
    tiers: list[DiskTier] = []

    def make(num_slots: int = 4, fingerprint: bytes = MODEL) -> DiskTier:
        tiers.append(DiskTier(tmp_path / "kv", num_slots * 3 * 4096, BLOCK, fingerprint))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def test_it_is_bounded_and_gives_up_the_least_recently_used(open_tier, tmp_path: Path) -> None:
    tier = open_tier(4)
    for i in range(4):
        tier.put(digest(i), content(i))
    assert tier.get(digest(0)) == content(0)
    tier.put(digest(9), content(9))
    assert tier.get(digest(1)) is None
    assert [tier.get(digest(i)) for i in (0, 2, 3, 9)] == [content(i) for i in (0, 2, 3, 9)]
    assert (tmp_path / "kv").stat().st_size == 4 * 3 * 4096


def test_it_survives_a_restart_but_not_another_model(open_tier) -> None:
    open_tier().put(digest(1), content(1))
    again = open_tier()
    assert again.get(digest(1)) == content(1)
    assert len(open_tier(fingerprint=b"other".ljust(16))) == 0


@given(offset=st.integers(0, 3 * 4096 - 1), mask=st.integers(1, 255))
@settings(max_examples=60)
def test_any_flipped_byte_costs_at_most_a_hit(
    tmp_path_factory: pytest.TempPathFactory, offset: int, mask: int
) -> None:
    path = tmp_path_factory.mktemp("tier") / "kv"
    tier = DiskTier(path, 3 * 4096, BLOCK, MODEL)
    tier.put(digest(1), content(1))
    raw = bytearray(path.read_bytes())
    raw[offset] ^= mask
    path.write_bytes(raw)
    assert tier.get(digest(1)) in (content(1), None)
    if offset < BLOCK + 4096 and (offset < 48 or offset >= 4096):
        assert tier.get(digest(1)) is None
        tier.put(digest(1), content(1))
        assert tier.get(digest(1)) == content(1)
    tier.close()


def test_a_full_disk_costs_hits_and_then_is_left_alone(open_tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(4)
    tier.put(digest(0), content(0))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_tier.os, "pwritev", full)
    for i in range(1, 40):
        tier.put(digest(i), content(i))
        assert tier.get(digest(i)) is None
    assert tier.is_off
    monkeypatch.undo()
    assert tier.get(digest(0)) is None


async def test_what_is_read_waits_for_one_write_at_most() -> None:
    thread, done, may = ReadsFirst("disk"), list[str](), threading.Event()
    thread.write(lambda: (may.wait(PATIENCE_S), done.append("first"))[1])
    for number in range(20):
        thread.write(partial(done.append, str(number)))
    reading = asyncio.create_task(thread.read(lambda: len(done)))
    await asyncio.sleep(0)
    may.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await reading == 1
    await asyncio.to_thread(thread.close)
    assert done == ["first", *map(str, range(20))]


async def test_what_fails_is_told_and_the_thread_goes_on() -> None:
    thread = ReadsFirst("disk")
    with pytest.raises(OSError, match="gone"):
        await thread.read(lambda: (_ for _ in ()).throw(OSError("gone")))
    assert await thread.read(lambda: 3) == 3
    thread.close()


def test_what_was_dropped_is_gone_for_the_next_process_too(open_tier) -> None:
    tier = open_tier()
    tier.put(digest(1), content(1))
    tier.drop()
    assert tier.get(digest(1)) is None
    assert len(open_tier()) == 0
    tier.put(digest(2), content(2))
    assert tier.get(digest(2)) == content(2)


def test_an_unusable_path_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        DiskTier(tmp_path / "file" / "kv", 1 << 20, BLOCK, MODEL)
    with pytest.raises(ConfigError, match="holds no block"):
        DiskTier(tmp_path / "kv", 4096, BLOCK, MODEL)
    assert os.listdir(tmp_path) == ["file"]

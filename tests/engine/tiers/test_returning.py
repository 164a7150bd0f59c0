"""Preempted sequences that lower tiers have: every token checks every KV byte that came back."""

import asyncio
from pathlib import Path

import pytest

from engine.planning.step_scheduler import StepScheduler
from tests.chaos.witness import undisturbed
from tests.engine.tiers.test_restoring import Served, config, prompts
from tests.patience import PATIENCE_S

SIZE, COUNT = 21, 40
"""Each prompt and output has so many tokens. Two sequences and a half of that size have room."""


async def answered(served: Served, names: list[str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(served.ends[name].wait() for name in names))
    assert served.failure is None
    for name, prompt in zip(names, prompts(len(names), SIZE), strict=True):
        assert tuple(served.tokens[name]) == undisturbed(prompt, COUNT)


def ask_all(served: Served, count: int = 6) -> list[str]:
    return [served.add(prompt, COUNT) for prompt in prompts(count, SIZE)]


async def emptied(served: Served) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while served.scheduler.load().num_used_blocks:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_groups", [1, 2], ids=["one pool", "a pool for each of two groups"])
@pytest.mark.parametrize(("host", "disk"), [(500, 0), (8, 500)], ids=["host", "both"])
async def test_what_lies_behind_the_last_full_block_is_computed_again(
    tmp_path: Path, host: int, disk: int, num_groups: int
) -> None:
    served = Served(config(tmp_path, host, disk), num_groups)
    await answered(served, ask_all(served))
    work = served.engine.work_counts()
    assert work.preempted >= work.returned > 0
    again = served.num_computed - 6 * (SIZE + COUNT - 1)
    assert again <= 3 * work.preempted, "full blocks were computed again"
    await emptied(served)
    await served.close()


class Slow:
    """What is fetched comes when it may."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may, self._fetch, self.num_asked = asyncio.Event(), served.store.fetch, 0
        assert isinstance(served.scheduler, StepScheduler)
        self._table = served.scheduler.group.table
        monkeypatch.setattr(served.store, "fetch", self.fetch)

    async def fetch(self, digests: list[bytes]) -> list[bytes]:
        self.num_asked += 1
        await self.may.wait()
        return await self._fetch(digests)

    async def key(self) -> str:
        """Wait until a sequence returns."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._table.returning:
                await asyncio.sleep(0)
        return next(iter(self._table.returning)).key


async def test_one_that_is_aborted_meanwhile_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(config(tmp_path, 500))
    slow, names = Slow(served, monkeypatch), ask_all(served)
    key = await slow.key()
    served.engine.abort(key)
    assert isinstance(served.scheduler, StepScheduler)
    assert key not in served.scheduler.group.table.all
    slow.may.set()
    others = [name for name in names if f"{name}#0" != key]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(served.ends[name].wait() for name in others))
    await emptied(served)
    assert not served.ends[key.removesuffix("#0")].is_set()
    await served.close()


async def until_none_runs(served: Served) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while served.scheduler.load().num_running:
            await asyncio.sleep(0.001)


async def test_the_engine_is_woken_when_all_that_is_here_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(config(tmp_path, 500))
    slow, names = Slow(served, monkeypatch), ask_all(served, 3)
    key = await slow.key()
    await until_none_runs(served)
    assert served.engine.load().planned.num_waiting == 1
    await asyncio.sleep(0.01)
    assert not served.ends[key.removesuffix("#0")].is_set()
    slow.may.set()
    await answered(served, names)
    await served.close()


async def test_closing_waits_for_what_is_being_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(config(tmp_path, 500))
    slow = Slow(served, monkeypatch)
    ask_all(served)
    await slow.key()
    closing = asyncio.create_task(served.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    slow.may.set()
    async with asyncio.timeout(PATIENCE_S):
        await closing
    assert served.failure is None
    served.scheduler.check_integrity()
    assert isinstance(served.scheduler, StepScheduler)
    assert not served.scheduler.prefixes.held_blocks


async def test_what_cannot_be_read_is_computed_and_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = 0

    async def fails(digests: list[bytes]) -> list[bytes]:
        nonlocal num_asked
        num_asked += 1
        raise OSError("the disk is gone")

    served = Served(config(tmp_path, 500))
    monkeypatch.setattr(served.store, "fetch", fails)
    await answered(served, ask_all(served))
    work = served.engine.work_counts()
    assert 0 < num_asked <= work.preempted
    assert work.returned == 0
    await emptied(served)
    await served.close()


async def test_damaged_blocks_cost_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the blocks of each prefix are there."""
    served = Served(config(tmp_path, 500))
    fetch = served.store.fetch

    async def half(digests: list[bytes]) -> list[bytes]:
        return await fetch(digests[: len(digests) // 2])

    monkeypatch.setattr(served.store, "fetch", half)
    await answered(served, ask_all(served))
    await emptied(served)
    await served.close()

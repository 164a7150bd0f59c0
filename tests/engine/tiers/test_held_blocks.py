"""What an engine with lower tiers tells the schedulers that it holds."""

import asyncio
import random
import threading
from pathlib import Path

import pytest

from core.kv import block_hashes
from core.types import Request, SamplingParams
from engine.tiers.block_digests import prefix_digests, root_digest
from tests.chaos.witness import undisturbed
from tests.engine.tiers.test_restoring import Served, config, prompts
from tests.patience import PATIENCE_S

Prompts = list[tuple[int, ...]]


class Listening(Served):
    """Sums up what its engine reports."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.held: set[int] = set()

    def hear(self) -> tuple[set[int], set[int]]:
        """Returns what the report adds and removes."""
        added, removed = map(set, self.engine.cached.drain_cache_events())
        assert not added & removed
        assert self.held.isdisjoint(added)
        assert self.held.issuperset(removed)
        self.held = (self.held | added) - removed
        return added, removed

    def on_device(self, texts: Prompts) -> set[int]:
        return {block for text in texts for block in block_hashes(text, 4)[: self.num_cached(text)]}

    def num_cached(self, text: tuple[int, ...]) -> int:
        request = Request(id="?", prompt=(*text, 0), sampling=SamplingParams(), reply_to="f")
        return self.scheduler.prefixes.cached_prefix(request).num_kept

    def below(self, texts: Prompts) -> set[int]:
        root = root_digest(self.store.root, "")
        return {
            block
            for text in texts
            for block, digest in zip(block_hashes(text, 4), prefix_digests(root, text, 4), strict=True)
            if digest in self.store
        }

    async def tells(self, texts: Prompts) -> set[int]:
        """Wait until its reports say what can be found of these texts. The disk has a thread of its own."""
        async with asyncio.timeout(PATIENCE_S):
            while self.hear() != (set(), set()) or self.held != self.on_device(texts) | self.below(texts):
                await asyncio.sleep(0.001)
        return self.held


def whole(texts: Prompts) -> Prompts:
    """With what is computed of the answers."""
    return [text + undisturbed(text, 2) for text in texts]


async def test_what_has_left_the_device_for_lower_tiers_is_not_given_up(tmp_path: Path) -> None:
    served = Listening(config(tmp_path, 500))
    for prompt in prompts(12):
        await served.ask(prompt)
        _, removed = served.hear()
        assert not removed
    assert len(served.held) == 12 * 10 > len(served.on_device(whole(prompts(12))))
    for prompt in prompts(12):
        await served.ask(prompt)
        assert served.hear() == (set(), set()), "what has come back was held all the time"
    await served.close()


@pytest.mark.parametrize("num_groups", [1, 2], ids=["one pool", "a pool for each of two groups"])
@pytest.mark.parametrize(("host", "disk"), [(20, 0), (0, 60), (20, 40), (60, 200)])
async def test_a_block_is_given_up_when_neither_the_device_nor_a_tier_has_it(
    tmp_path: Path, host: int, disk: int, num_groups: int
) -> None:
    rng, served = random.Random(host + disk), Listening(config(tmp_path, host, disk), num_groups=num_groups)
    texts = [(*prompt[: 4 * cut], *prompt) for prompt in prompts(9, 21) for cut in (0, 3)]
    for _ in range(6):
        for text in rng.sample(texts, 5):
            await served.ask(text)
            if rng.random() < 0.5:
                served.hear()
        await served.tells(whole(texts))
        if rng.random() < 0.3:
            served.engine.drop_cache()
    await served.close()


async def test_all_that_was_dropped_is_given_up(tmp_path: Path) -> None:
    served = Listening(config(tmp_path, 60, 500))
    for prompt in prompts(12):
        await served.ask(prompt)
    assert len(await served.tells(whole(prompts(12)))) > 60
    served.engine.drop_cache()
    assert not await served.tells(whole(prompts(12)))
    await served.close()


async def test_a_scheduler_that_knows_nothing_is_told_of_what_lies_below_too(tmp_path: Path) -> None:
    served = Listening(config(tmp_path, 70))
    for prompt in prompts(12):
        await served.ask(prompt)
    before = await served.tells(whole(prompts(12)))
    served.engine.cached.replay_cache_events()
    served.held = set()
    assert served.hear() == (before, set())
    await served.ask(prompts(13)[12])
    await served.tells(whole(prompts(13)))
    await served.close()


async def test_a_buddys_copies_are_told_of_once_they_have_been_read_back(tmp_path: Path) -> None:
    served, text = Listening(config(tmp_path, 500)), prompts(1)[0]
    other = Served(config(tmp_path, 500))
    other.store.on_saved = served.store.accept
    await other.ask(text)
    assert served.hear() == (set(), set())
    assert await served.ask(text) <= 5
    await served.tells(whole([text]))
    for prompt in prompts(12)[1:]:
        await served.ask(prompt)
    assert await served.tells(whole(prompts(12))) >= set(block_hashes(text, 4))
    await other.close()
    await served.close()


async def test_what_a_disk_has_from_an_earlier_run_is_told_of_once_it_has_been_read_back(
    tmp_path: Path,
) -> None:
    served, text = Served(config(tmp_path, 0, 500)), prompts(1)[0]
    await served.ask(text)
    await served.close()
    again = Listening(config(tmp_path, 0, 500))
    assert again.hear() == (set(), set())
    assert await again.ask(text) <= 5
    await again.tells(whole([text]))
    for prompt in prompts(12)[1:]:
        await again.ask(prompt)
    assert await again.tells(whole(prompts(12))) >= set(block_hashes(text, 4))
    await again.close()


async def test_a_disk_that_is_left_alone_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = threading.Event()

    def full(*_: object) -> int:
        may.wait(PATIENCE_S)
        raise OSError("No space left on device")

    served = Listening(config(tmp_path, 0, 500))
    for prompt in prompts(3):
        await served.ask(prompt)
    assert len(await served.tells(whole(prompts(3)))) == 30
    monkeypatch.setattr("engine.tiers.disk_tier.os.pwritev", full)
    for prompt in prompts(12)[3:]:
        await served.ask(prompt)
    served.hear()
    assert len(served.held) == 120, "what is on its way to the disk"
    may.set()
    async with asyncio.timeout(PATIENCE_S):
        while len(await served.tells(whole(prompts(12)))) > 40:  # the device's
            await asyncio.sleep(0.001)
    await served.close()


def beginnings(served: Listening, texts: Prompts) -> list[int]:
    """For each text, how many of its blocks lie below. No block does without those before it."""
    counts: list[int] = []
    for text in texts:
        hashes, below = block_hashes(text, 4), served.below([text])
        counts.append(len(below))
        assert below == set(hashes[: len(below)])
    return counts


@pytest.mark.parametrize(("host", "disk"), [(64, 0), (0, 64)], ids=["host", "disk"])
async def test_the_beginning_of_each_prompt_stays_below_longest(tmp_path: Path, host: int, disk: int) -> None:
    served = Listening(config(tmp_path, host, disk))
    for prompt in prompts(12):
        await served.ask(prompt)
    async with asyncio.timeout(PATIENCE_S):  # the disk has a thread of its own
        while beginnings(served, prompts(12)) != [0] * 5 + [4] + [10] * 6:
            await served.tells(whole(prompts(12)))
            await asyncio.sleep(0.001)
    await served.close()


async def test_so_does_that_of_a_buddys_copies_that_have_been_read_back(tmp_path: Path) -> None:
    served, other = Listening(config(tmp_path, 35)), Served(config(tmp_path, 500))
    other.store.on_saved = served.store.accept
    await other.ask(prompts(1)[0])
    for prompt in prompts(4):
        await served.ask(prompt)
    assert beginnings(served, prompts(4)) == [5, 10, 10, 10]
    await other.close()
    await served.close()

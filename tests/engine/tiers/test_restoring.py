"""An engine with lower tiers over a device pool that is far too small: every token checks every KV byte that came back."""

import asyncio
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from core.clock import WallClock
from core.config.cluster_config import EngineConfig
from core.errors import Bug
from core.kv import RankPool
from core.plan import FailedSeq
from core.types import CacheHints, Request, SamplingParams, TokenOut
from engine.execution.inline_group import InlineGroup
from engine.loop import Engine
from engine.planning.dp_scheduler import make_planner
from engine.tiers.block_pieces import BlockPieces
from engine.tiers.build_tiers import build_tiers
from engine.tiers.restoring import Restoring
from engine.tiers.tier_store import TierStore
from tests.chaos.witness import SHARD, WitnessRank, undisturbed
from tests.engine.fifo_policy import FifoPolicy
from tests.patience import PATIENCE_S

NUM_BLOCKS = 40
BLOCK_BYTES = SHARD.pool_bytes(1)


class HeldBack(BlockPieces):
    """A block comes back when it may."""

    may = threading.Event()
    may.set()

    def scatter(self, block: int, content: memoryview) -> None:
        self.may.wait(PATIENCE_S)
        super().scatter(block, content)


class Served:
    """An engine over the witness device. `num_groups` share the pool."""

    def __init__(self, config: EngineConfig, num_groups: int = 1) -> None:
        pool = memoryview(mmap.mmap(-1, SHARD.pool_bytes(NUM_BLOCKS)))
        with patch("engine.tiers.build_tiers.BlockPieces", HeldBack):
            self.store: TierStore = build_tiers(
                config, pool, [RankPool(shard=SHARD, num_blocks=NUM_BLOCKS)], "witness"
            )  # type: ignore[assignment]
        self.scheduler = make_planner(config, NUM_BLOCKS, 1000, FifoPolicy(), num_groups)
        self.num_computed = 0
        self.memory = pool
        rank = WitnessRank(pool, NUM_BLOCKS, None, 0.0)

        def step(plan):
            self.num_computed += plan.num_tokens
            return rank.step(plan)

        self.restoring = Restoring(self.scheduler.prefixes, self.store, config.block_size)
        self.engine = Engine(
            self.scheduler,
            InlineGroup(step),
            WallClock(),
            tiers=self.restoring,
        )
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, asyncio.Event] = {}
        self.failure: BaseException | None = None
        self.running = asyncio.create_task(self.engine.run(self))
        self.count = 0
        self.hints = CacheHints()
        """What is said of requests from now on."""

    def on_error(self, error: BaseException) -> None:
        self.failure = error

    def on_stuck(self, keys: list[str]) -> None:
        raise AssertionError(f"{keys} are stuck")

    def on_taken_back(self, paused: list[str], lost: list[str]) -> None:
        raise AssertionError(f"nothing sends {paused} and {lost} on")

    def on_failed(self, failed: Sequence[FailedSeq]) -> None:
        raise AssertionError(f"{failed} have no images")

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        for token in tokens:
            self.tokens[token.request_id].append(token.token)
            if token.finish:
                self.ends[token.request_id].set()

    def add(self, prompt: tuple[int, ...], max_tokens: int = 3) -> str:
        name = f"r{self.count}"
        self.count += 1
        self.tokens[name], self.ends[name] = [], asyncio.Event()
        sampling = SamplingParams(max_tokens=max_tokens)
        self.engine.add(Request(id=name, prompt=prompt, sampling=sampling, reply_to="f", hints=self.hints))
        return name

    async def ask(self, prompt: tuple[int, ...], max_tokens: int = 3) -> int:
        """Checks the answer; returns how many tokens had to be computed for it."""
        before, name = self.num_computed, self.add(prompt, max_tokens)
        async with asyncio.timeout(PATIENCE_S):
            await self.ends[name].wait()
        assert self.failure is None
        assert tuple(self.tokens[name]) == undisturbed(prompt, max_tokens)
        return self.num_computed - before

    async def close(self) -> None:
        self.scheduler.check_integrity()
        await self.engine.close()
        await self.running


def config(tmp_path: Path, host_blocks: int, disk_blocks: int = 0) -> EngineConfig:
    return EngineConfig(
        block_size=4,
        max_batch_tokens=32,
        host_cache_bytes=host_blocks * BLOCK_BYTES,
        disk_cache_bytes=disk_blocks * 2 * 4096,
        disk_cache_path=str(tmp_path / "disk") if disk_blocks else "",
    )


def prompts(count: int, size: int = 41) -> list[tuple[int, ...]]:
    return [tuple(1000 * i + j for j in range(size)) for i in range(1, count + 1)]


@pytest.mark.parametrize(("host", "disk"), [(500, 0), (0, 500), (30, 500)], ids=["host", "disk", "both"])
async def test_prefixes_come_back_from_below_instead_of_being_computed(
    tmp_path: Path, host: int, disk: int
) -> None:
    served = Served(config(tmp_path, host, disk))
    for prompt in prompts(12):  # 12 x 11 blocks through a pool of 40
        assert await served.ask(prompt) > 40
    for prompt in prompts(12):
        computed = await served.ask(prompt)
        assert computed <= 5, "its prefix was computed again"
    assert served.engine.tier_counts().host_hits + served.engine.tier_counts().disk_hits >= 80
    await served.close()


async def test_requests_that_find_every_block_being_filled_go_on_when_that_is_over(tmp_path: Path) -> None:
    served = Served(config(tmp_path, 500))
    for prompt in prompts(12):
        await served.ask(prompt)
    HeldBack.may.clear()
    names = [served.add(prompt) for prompt in prompts(4)]  # 10 blocks each of 40
    async with asyncio.timeout(PATIENCE_S):
        while served.scheduler.load().num_used_blocks < NUM_BLOCKS:
            await asyncio.sleep(0.001)
    HeldBack.may.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(served.ends[name].wait() for name in names))
    for name, prompt in zip(names, prompts(4), strict=True):
        assert tuple(served.tokens[name]) == undisturbed(prompt, 3)
    await served.close()


async def test_what_comes_back_from_disk_is_saved_above_it_as_it_was(tmp_path: Path) -> None:
    served = Served(config(tmp_path, 30, 500))
    for prompt in prompts(12):
        await served.ask(prompt)
    heard: dict[bytes, bytes] = {}
    served.store.on_saved = heard.__setitem__
    HeldBack.may.clear()
    name = served.add(prompts(1)[0])
    async with asyncio.timeout(PATIENCE_S):
        while len(heard) < 9:
            await asyncio.sleep(0.001)
        told = dict(heard)
        HeldBack.may.set()
        await served.ends[name].wait()
    again = await served.store.fetch(list(told))
    assert again == list(told.values()), "copied out of blocks that were not filled yet"
    await served.close()


async def test_the_next_turn_finds_what_decode_has_produced(tmp_path: Path) -> None:
    served = Served(config(tmp_path, 500))
    first = prompts(1)[0]
    await served.ask(first, 20)
    for other in prompts(12)[1:]:
        await served.ask(other)
    turn = first + undisturbed(first, 20) + (5, 6, 7)
    assert await served.ask(turn) <= 4 + 3 + 4
    await served.close()


async def test_what_was_dropped_is_found_nowhere_any_more(tmp_path: Path) -> None:
    served = Served(config(tmp_path, 20, 500))
    for prompt in prompts(6):
        await served.ask(prompt)
    running = served.add(prompts(7)[6], 40)
    async with asyncio.timeout(PATIENCE_S):
        while not served.tokens[running]:
            await asyncio.sleep(0.001)
    dropped = served.engine.drop_cache()
    assert min(dropped.device, dropped.host, dropped.disk, dropped.in_use) > 0
    for prompt in prompts(3):
        assert await served.ask(prompt) >= len(prompt)
    async with asyncio.timeout(PATIENCE_S):
        await served.ends[running].wait()
    assert tuple(served.tokens[running]) == undisturbed(prompts(7)[6], 40)
    assert served.engine.drop_cache().in_use == 0
    await served.close()
    again = Served(config(tmp_path, 0, 500))
    assert await again.ask(prompts(5)[4]) >= 41, "the file on the disk was forgotten, not its content"
    await again.close()


async def test_a_restarted_instance_finds_its_disk(tmp_path: Path) -> None:
    served = Served(config(tmp_path, 0, 500))
    for prompt in prompts(6):
        await served.ask(prompt)
    await served.close()
    again = Served(config(tmp_path, 0, 500))
    for prompt in prompts(6):
        assert await again.ask(prompt) <= 5
    await again.close()


async def test_a_damaged_disk_costs_hits_but_no_token(tmp_path: Path) -> None:
    served = Served(config(tmp_path, 0, 500))
    for prompt in prompts(8):
        await served.ask(prompt)
    path = tmp_path / "disk" / "kv-0"
    raw = bytearray(path.read_bytes())
    for at in range(4096, len(raw), 8192):
        raw[at] ^= 1
    path.write_bytes(raw)
    for prompt in prompts(8):
        await served.ask(prompt)
    assert served.engine.tier_counts().missed > 0
    await served.close()


async def test_a_prefix_that_cannot_be_filled_in_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise OSError("no memory")

    served = Served(config(tmp_path, 500))
    for prompt in prompts(12):
        await served.ask(prompt)
    monkeypatch.setattr(served.store, "fill", fails)
    assert await served.ask(prompts(1)[0]) > 40
    await served.close()


async def test_a_restore_that_cannot_end_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request would wait for ever otherwise, and its blocks would stay in use."""

    def fails(*_: object) -> None:
        raise Bug("the restore is unknown")

    served = Served(config(tmp_path, 500))
    for prompt in prompts(12):
        await served.ask(prompt)
    monkeypatch.setattr(served.scheduler.prefixes, "end_restore", fails)
    served.add(prompts(1)[0], 3)
    async with asyncio.timeout(PATIENCE_S):
        await served.running
    assert isinstance(served.failure, Bug)
    await served.engine.close()


async def test_many_at_once_with_cancellations_leave_nothing(tmp_path: Path) -> None:
    served = Served(config(tmp_path, 20, 500))
    for prompt in prompts(8):
        await served.ask(prompt)
    names = [served.add(prompt, 6) for prompt in prompts(8) * 2]
    for name in names[::3]:
        served.engine.abort(f"{name}#0")
    for name in set(names) - set(names[::3]):
        async with asyncio.timeout(PATIENCE_S):
            await served.ends[name].wait()
        prompt = (prompts(8) * 2)[names.index(name)]
        assert tuple(served.tokens[name]) == undisturbed(prompt, 6)
    async with asyncio.timeout(PATIENCE_S):
        while served.scheduler.load().num_used_blocks:
            await asyncio.sleep(0.01)
    await served.close()

"""With copies at a buddy, a killed decode instance's sequences go on without their KV being computed again."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.witness import SHARD
from tests.chaos.world import World
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SURE = 40
"""Tokens that a run may be unsure of; computing the lost sequences again takes four times as many."""


async def computed_after_a_kill(folder: Path, replicas: int) -> int:
    """Tokens that the survivors computed beyond those that were still to be generated."""
    for number in range(5):
        num_tokens, unsure = await one_kill(folder / str(number), replicas)
        if unsure < SURE:
            return num_tokens
    raise AssertionError("this machine stood still whenever it was looked at")


async def one_kill(folder: Path, replicas: int) -> tuple[int, int]:
    """(such tokens, how many were generated while the survivors were asked, and may be among them by mistake)"""
    overrides = {
        "engine.num_blocks": 400,
        "transfer.kv_replicas": replicas,
        "engine.host_cache_bytes": 2000 * SHARD.pool_bytes(1),
    }
    async with World(folder, overrides) as world:
        names = [world.generate("frontend0", world.fresh_prompt(60), 120) for _ in range(4)]
        streams = [world.streams[name] for name in names]

        def left() -> int:
            return sum(stream.max_tokens - len(stream.tokens) for stream in streams)

        while min(len(stream.tokens) for stream in streams) < 80:
            await asyncio.sleep(0.01)
        await world.kill("decode0")
        left_then = left()
        before = await computed(world)
        left_now = left()
        for stream in streams:
            async with asyncio.timeout(PATIENCE_S):
                await stream.done.wait()
            assert not stream.error
            assert tuple(stream.tokens) == stream.expected
        spent = await computed(world) - before
        await world.start("decode0")
        await world.settled()
        return spent - left_now, left_then - left_now


async def computed(world: World) -> int:
    names = ["prefill0", "prefill1", "decode1"]
    return sum([(await world.nodes[name].status())["computed"] for name in names])


async def test_failover_needs_no_recompute(tmp_path: Path) -> None:
    without = await computed_after_a_kill(tmp_path / "without", 0)
    replicated = await computed_after_a_kill(tmp_path / "with", 1)
    assert without > 100, "nothing was lost: the test shows nothing"
    assert replicated < without / 3

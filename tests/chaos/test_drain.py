"""A decode instance that drains: its sequences move while they decode, and no client loses or waits for more than a moment."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.world import ON_DEVICE, World
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    "wanted",
    [{"transfer.transport": "shm"}, {"transfer.transport": "tcp"}, {ON_DEVICE: True}],
    ids=["shm", "tcp", "device"],
)
async def test_running_sequences_move_with_their_kv(tmp_path: Path, wanted: dict[str, Any]) -> None:
    async with World(tmp_path, wanted) as world:
        names = [world.generate(f"frontend{i % 2}", world.fresh_prompt(20), 90) for i in range(4)]
        streams = [world.streams[name] for name in names]
        while min(len(stream.tokens) for stream in streams) < 10:
            await asyncio.sleep(0.01)
        before = {name: (await world.nodes[name].status())["computed"] for name in ("prefill0", "prefill1")}
        moving = [stream for stream in streams if not stream.done.is_set()]
        at = [len(stream.tokens) for stream in moving]
        world.nodes["decode0"].do(do="drain")
        await world.nodes["decode0"].wait_for("drained")
        assert not any(stream.done.is_set() for stream in moving), "they were waited for, not moved"
        for stream in streams:
            async with asyncio.timeout(PATIENCE_S):
                await stream.done.wait()
            assert not stream.error
            assert tuple(stream.tokens) == stream.expected
        after = {name: (await world.nodes[name].status())["computed"] for name in ("prefill0", "prefill1")}
        assert after == before, "their KV was computed again"
        pauses = [max(stream.gaps_s[start:]) for stream, start in zip(moving, at, strict=True)]
        assert max(pauses) < 2.0
        await world.kill("decode0")
        await world.start("decode0")
        await world.settled()

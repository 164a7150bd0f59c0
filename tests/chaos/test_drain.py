"""A decode instance that drains: its sequences move while they decode, and no client loses or waits for more than a moment."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.world import ON_DEVICE, World
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PATIENT = {"engine.num_blocks": 400, "mail.peer_timeout_s": PATIENCE_S / 2}
"""Nobody who only waits for a processor is given up, and there is room for all sequences at one instance."""


@pytest.mark.parametrize(
    "wanted",
    [{"transfer.transport": "shm"}, {"transfer.transport": "tcp"}, {ON_DEVICE: True}],
    ids=["shm", "tcp", "device"],
)
async def test_running_sequences_move_with_their_kv(tmp_path: Path, wanted: dict[str, Any]) -> None:
    async with World(tmp_path, PATIENT | wanted) as world:
        names = [world.generate(f"frontend{i % 2}", world.fresh_prompt(20), 200) for i in range(4)]
        streams = [world.streams[name] for name in names]
        while min(len(stream.tokens) for stream in streams) < 10:
            await asyncio.sleep(0.01)
        before = {name: (await world.nodes[name].status())["computed"] for name in ("prefill0", "prefill1")}
        at, leaving = [len(stream.tokens) for stream in streams], world.nodes["decode0"].address
        world.nodes["decode0"].do(do="drain")
        await world.nodes["decode0"].wait_for("drained")
        for stream in streams:
            async with asyncio.timeout(PATIENCE_S):
                await stream.done.wait()
            assert not stream.error
            assert tuple(stream.tokens) == stream.expected
        after = {name: (await world.nodes[name].status())["computed"] for name in ("prefill0", "prefill1")}
        assert after == before, "their KV was computed again"
        assert any(leaving in stream.lost for stream in streams), "they were waited for, not moved"
        pauses = [max(stream.gaps_s[start:], default=0.0) for stream, start in zip(streams, at, strict=True)]
        assert max(pauses) < PATIENCE_S / 4, "nobody waits until somebody is given up"
        await world.kill("decode0")
        await world.start("decode0")
        await world.settled()

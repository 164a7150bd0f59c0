"""While a slow link carries a prompt's KV, prefill goes on generating; the sequence changes over between two tokens."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.world import World
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT_TOKENS = 41
"""Leaves room for the KV of three more in a block of four."""


async def computed_by_prefill(world: World, write_s: float) -> int:
    prefills = [node for node in world.nodes.values() if node.role == "prefill"]
    for node in prefills:
        await node.carry_out(do="slow", write_s=write_s)
    before = sum([(await node.status())["computed"] for node in prefills])
    stream = world.streams[world.generate("frontend0", world.fresh_prompt(PROMPT_TOKENS), 12)]
    async with asyncio.timeout(PATIENCE_S):
        await stream.done.wait()
    assert not stream.error
    assert tuple(stream.tokens) == stream.expected
    await world.settled()
    return sum([(await node.status())["computed"] for node in prefills]) - before


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_prefill_goes_on_while_its_kv_is_on_the_way(tmp_path: Path, transport: str) -> None:
    async with World(tmp_path, {"transfer.transport": transport}) as world:
        quick = [await computed_by_prefill(world, 0.0) for _ in range(5)]
        assert min(quick) == PROMPT_TOKENS, (
            "a link is slow now and then where the machine is busy, but not each time"
        )
        assert await computed_by_prefill(world, 0.1) > PROMPT_TOKENS

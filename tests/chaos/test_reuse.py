"""What one decode instance has produced is found, or fetched, by the next turn of the conversation, wherever that is placed."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.witness import undisturbed
from tests.chaos.world import World
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ANSWER = 300
"""Tokens: an idle prefill instance, whose time is cheap, computes a short answer again."""


async def test_the_next_turn_finds_what_decode_has_produced(tmp_path: Path) -> None:
    async with World(tmp_path, {"engine.num_blocks": 400}, apart=False) as world:
        first = world.fresh_prompt(60)

        async def turn(prompt: tuple[int, ...], max_tokens: int) -> int:
            before = await computed(world)
            stream = world.streams[world.generate("frontend0", prompt, max_tokens)]
            async with asyncio.timeout(PATIENCE_S):
                await stream.done.wait()
            assert tuple(stream.tokens) == stream.expected
            return await computed(world) - before

        await turn(first, ANSWER)
        async with asyncio.timeout(PATIENCE_S):  # the scheduler hears what is cached with what was computed
            while (await world.nodes["scheduler"].status())["computed"] != await computed(world):
                await asyncio.sleep(0.01)
        second = (*first, *undisturbed(first, ANSWER), *world.fresh_prompt(10))
        assert await turn(second, 4) < 30, "the first turn was computed again"
        await world.settled()


async def computed(world: World) -> int:
    names = [name for name, node in world.nodes.items() if node.role in ("prefill", "decode")]
    return sum([(await world.nodes[name].status())["computed"] for name in names])

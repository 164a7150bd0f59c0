"""Two schedulers at once: one that dies under streams is not missed, and what both fill at once loses and starves nobody. And a
single one, whose spare takes over."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.world import Stream, World
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
TWO = {"serve.schedulers": 2, "engine.num_blocks": 400}
PATIENT = TWO | {"mail.peer_timeout_s": PATIENCE_S / 2, "engine.num_blocks": 800}
"""Nobody who only waits for a processor is given up, and there is room for all, so that nothing is computed twice. A process that is
killed is missed at once."""
ONE = {"engine.num_blocks": 800, "mail.peer_timeout_s": PATIENCE_S / 2}
PROMPT, OUTPUT, LONG = 30, 60, 150
NUM_STREAMS = 12


def begin(world: World, count: int, num_prompt: int = PROMPT, max_tokens: int = OUTPUT) -> list[Stream]:
    names = [
        world.generate(f"frontend{i % 2}", world.fresh_prompt(num_prompt), max_tokens) for i in range(count)
    ]
    return [world.streams[name] for name in names]


async def end(streams: list[Stream]) -> None:
    """Each as if nothing had happened."""
    async with asyncio.timeout(PATIENCE_S):
        for stream in streams:
            await stream.done.wait()
    for stream in streams:
        assert not stream.error
        assert tuple(stream.tokens) == stream.expected


async def total(world: World, role: str, what: str) -> int:
    names = [name for name, node in world.nodes.items() if node.role == role]
    return sum([(await world.nodes[name].status())[what] for name in names])


async def told_of_all(world: World, name: str) -> int:
    """Wait until a scheduler knows what the other one has placed, too. Returns how many requests it has placed itself."""
    while len((status := await world.nodes[name].status())["routes"]) < NUM_STREAMS:
        await asyncio.sleep(0.01)
    return status["placed"]


async def test_a_scheduler_is_killed_under_streams(tmp_path: Path) -> None:
    async with World(tmp_path, PATIENT) as world:
        running = begin(world, NUM_STREAMS, max_tokens=LONG)
        async with asyncio.timeout(PATIENCE_S):
            while min(len(stream.tokens) for stream in running) < 5:
                await asyncio.sleep(0.01)
            placed = [await told_of_all(world, name) for name in ("scheduler0", "scheduler1")]
        assert sum(placed) == NUM_STREAMS
        killed = asyncio.create_task(world.kill("scheduler0"))
        during = begin(world, 8)
        await killed
        await end(running + during)
        assert max(gap for stream in running + during for gap in stream.gaps_s) < PATIENCE_S / 2
        assert (await world.nodes["scheduler1"].status())["placed"] >= 8
        await world.start("scheduler0")
        await world.settled()
        after: list[Stream] = []
        async with asyncio.timeout(PATIENCE_S):  # frontends look for it every five seconds at the latest
            while not (await world.nodes["scheduler0"].status())["placed"]:
                after += begin(world, 8)
                await end(after)
        await world.settled()
        streams = running + during + after
        roles = [await total(world, role, "computed") for role in ("prefill", "decode")]
        assert sum(roles) == sum(PROMPT + stream.max_tokens - 1 for stream in streams), (
            "something was computed twice"
        )


async def test_a_scheduler_that_is_stopped_is_left_and_comes_back(tmp_path: Path) -> None:
    async with World(tmp_path, TWO) as world:
        running = begin(world, 4)
        while min(len(stream.tokens) for stream in running) < 5:
            await asyncio.sleep(0.01)
        world.freeze("scheduler1")
        await asyncio.sleep(2.0)  # the others give it up after one
        during = begin(world, 6)
        await end(running + during)
        world.thaw("scheduler1")
        await world.settled()
        await end(begin(world, 6))
        await world.settled()


async def test_what_both_fill_at_once_is_served(tmp_path: Path) -> None:
    """Sixteen requests for two instances with room for three each, through both schedulers in the same moment."""
    async with World(tmp_path, TWO | {"engine.num_blocks": 75}) as world:
        streams = begin(world, 16, num_prompt=60, max_tokens=30)
        large = begin(world, 2, num_prompt=200, max_tokens=30)
        await end(streams + large)
        await world.settled()


async def num_placed(world: World) -> list[int]:
    return [(await world.nodes[name].status())["placed"] for name in ("scheduler0", "scheduler1")]


async def test_the_only_scheduler_is_killed_beneath_streams_and_new_requests(tmp_path: Path) -> None:
    async with World(tmp_path, ONE, num_spares=1) as world:
        running = begin(world, NUM_STREAMS, max_tokens=LONG)
        async with asyncio.timeout(PATIENCE_S):
            while min(len(stream.tokens) for stream in running) < 5:
                await asyncio.sleep(0.01)
        placed = await num_placed(world)
        assert sorted(placed) == [0, NUM_STREAMS], "one scheduler places everything, and its spare nothing"
        only, spare = (f"scheduler{placed.index(count)}" for count in (NUM_STREAMS, 0))
        during = begin(world, 4)
        killed = asyncio.create_task(world.kill(only))
        during += begin(world, 8)
        await killed
        during += begin(world, 8)
        await end(running + during)
        assert (await world.nodes[spare].status())["placed"] >= 8
        await world.start(only)
        await world.settled()
        before = (await world.nodes[spare].status())["placed"]
        await end(begin(world, 8))
        assert (await world.nodes[spare].status())["placed"] == before + 8, "what took over goes on"
        assert (await world.nodes[only].status())["placed"] == 0, "what comes in its place is the spare"


async def test_the_only_scheduler_is_stopped_and_comes_back_as_the_spare(tmp_path: Path) -> None:
    """Both place requests for a while, as two schedulers do."""
    async with World(tmp_path, ONE | {"mail.peer_timeout_s": 1.0}, num_spares=1) as world:
        await end(begin(world, 4))
        placed = await num_placed(world)
        only, spare = (f"scheduler{placed.index(count)}" for count in (4, 0))
        running = begin(world, 4, max_tokens=LONG)
        while min(len(stream.tokens) for stream in running) < 5:
            await asyncio.sleep(0.01)
        world.freeze(only)
        during = begin(world, 8)
        await end(during)
        world.thaw(only)
        await end(running + begin(world, 8))
        await world.settled()
        before = (await world.nodes[spare].status())["placed"]
        await end(begin(world, 6))
        assert (await world.nodes[spare].status())["placed"] == before + 6
        await world.settled()

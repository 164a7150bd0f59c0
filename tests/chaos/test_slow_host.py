"""Three hosts, to one of which the network is slow: what is handed over goes round it."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.world import Stream, World
from tests.deploy.network import NetworkEnd, missing_network, network
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.turns(6, number=0)]

SLOW_KBIT_PER_S = 200
"""A prompt's KV of 38 kB takes 1.5 s, and computing it 0.1 s."""
PROMPT_TOKENS = 200
NUM_FIRST = 20
NUM_THEN = 30
MEAN_GAP_S = 0.1
OVERRIDES = {
    "transfer.transport": "tcp",
    "engine.num_blocks": 2000,
    "mail.heartbeat_s": 1.0,
    "mail.peer_timeout_s": 30.0,
    "mail.reconnect_s": 20.0,
}


@pytest.fixture
def ends() -> Iterator[list[NetworkEnd]]:
    if reason := missing_network():
        pytest.skip(reason)
    with network(3) as found:
        yield found


async def answered(world: World, count: int, rng: random.Random) -> list[Stream]:
    names: list[str] = []
    for _ in range(count):
        names.append(world.generate("frontend0", world.fresh_prompt(PROMPT_TOKENS), 12))
        await asyncio.sleep(rng.expovariate(1 / MEAN_GAP_S))
    streams = [world.streams[name] for name in names]
    async with asyncio.timeout(PATIENCE_S):
        for stream in streams:
            await stream.done.wait()
            assert not stream.error
            assert tuple(stream.tokens) == stream.expected
    return streams


def senders_to(world: World, streams: list[Stream], decode: str) -> list[str]:
    """The prefill instance of each prompt that was handed over to this decode instance."""
    address = world.nodes[decode].address
    return [prefill for one in streams for prefill, at in one.routes if prefill and at == address]


async def test_a_host_behind_a_slow_link_gets_no_hand_over_that_computing_would_beat(
    tmp_path: Path, ends: list[NetworkEnd]
) -> None:
    first, second, third = ends
    third.slow(SLOW_KBIT_PER_S)
    places = {"decode0": second, "decode1": third}
    places |= dict.fromkeys(("scheduler", "prefill0", "prefill1", "frontend0", "frontend1"), first)
    async with World(tmp_path, OVERRIDES, apart=False, places=places) as world:
        rng = random.Random(0)
        know = set(senders_to(world, await answered(world, NUM_FIRST, rng), "decode1"))
        assert know, "nobody has tried the slow link"
        then = await answered(world, NUM_THEN, rng)
        assert senders_to(world, then, "decode0"), "nothing is handed over: the test shows nothing"
        assert know.isdisjoint(senders_to(world, then, "decode1"))
        await world.settled()

"""Disks that fill up, or give back what was not written, under running instances: hits are lost, tokens are not."""

import asyncio
from pathlib import Path

import pytest

from tests.chaos.witness import SHARD
from tests.chaos.world import World
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def serve(world: World, prompts: list[tuple[int, ...]]) -> None:
    streams = [world.streams[world.generate("frontend0", prompt, 12)] for prompt in prompts]
    for stream in streams:
        async with asyncio.timeout(PATIENCE_S):
            await stream.done.wait()
        assert not stream.error
        assert tuple(stream.tokens) == stream.expected


@pytest.mark.parametrize("fault", ["full disk", "damage"])
async def test_a_bad_disk_costs_hits_only(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "disk"
    overrides = {
        "engine.num_blocks": 60,
        "engine.host_cache_bytes": 20 * SHARD.pool_bytes(1),
        "engine.disk_cache_bytes": 4 << 20,
        "engine.disk_cache_path": str(folder),
    }
    async with World(tmp_path / "world", overrides) as world:
        prompts = [world.fresh_prompt(44) for _ in range(16)]
        await serve(world, prompts)
        instances = [node for node in world.nodes.values() if node.role in ("prefill", "decode")]
        if fault == "full disk":
            for node in instances:
                await node.carry_out(do="full disk")
        else:
            for path in folder.glob("kv-?"):
                raw = bytearray(path.read_bytes())
                raw[4096::8192] = bytes(byte ^ 1 for byte in raw[4096::8192])
                path.write_bytes(raw)
        await serve(world, prompts)
        await serve(world, [*prompts[::2], *(world.fresh_prompt(44) for _ in range(8))])
        await world.settled()

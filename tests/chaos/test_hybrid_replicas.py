"""With copies at a buddy, a killed decode instance's sequences go on from their recurrent states."""

import asyncio
from pathlib import Path

import pytest

from models.families.table import read_spec
from tests.chaos.hybrid import HybridModel
from tests.chaos.world import OVERRIDES, World
from tests.models.checkpoints import HYBRID
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.turns(3)]
REPLICATED = {"transfer.kv_replicas": 1, "engine.host_cache_bytes": 1 << 26}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("family", HYBRID)
async def test_a_buddy_goes_on_from_the_states_of_a_killed_instance(
    family: str, transport: str, tmp_path: Path
) -> None:
    model = HybridModel(tmp_path / "model", family)
    layout = read_spec(tmp_path / "model").kv_layout(OVERRIDES["engine.block_size"], "float32")
    overrides = {**REPLICATED, "transfer.transport": transport}
    async with World(tmp_path / "world", overrides, model=model) as world:
        streams = [
            world.streams[world.generate(f"frontend{i}", world.fresh_prompt(60), 190)] for i in range(2)
        ]
        async with asyncio.timeout(PATIENCE_S):
            while len(streams[0].tokens) < 75:
                await asyncio.sleep(0.005)
        _, lost = await world.route("frontend0")
        await world.kill(lost)
        assert not streams[0].done.is_set(), "nothing is lost: the test shows nothing"
        for stream in streams:
            async with asyncio.timeout(PATIENCE_S):
                await stream.done.wait()
            assert not stream.error
            assert tuple(stream.tokens) == stream.expected
        await world.start(lost)
        await world.settled()
        assert sum((await world.restored_blocks()).values()) >= layout.state_blocks, "no state was restored"

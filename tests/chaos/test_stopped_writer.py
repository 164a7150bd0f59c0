"""A prefill process that is stopped after it has begun to write through shared memory, which only it can undo."""

from pathlib import Path

import pytest

from tests.chaos.cases import Case
from tests.chaos.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def test_the_client_is_served_elsewhere_at_once_and_only_the_blocks_wait(tmp_path: Path) -> None:
    async with World(tmp_path, {"transfer.drain_timeout_s": 60.0}) as world:
        case = Case(world, "stopped writer")
        nodes = await case.arm("prefill", "prefill.SENDING")
        stream = world.streams[world.generate("frontend0", world.fresh_prompt(40), 20)]
        writer = await case.first_trapped(nodes)
        case.disarm("prefill", but=writer)
        await case.end(stream)
        assert writer.state() == "T", "nobody waited for it"
        # 1 s of silence and half a second for the fence; a busy machine may take longer, but what writes is waited for far longer.
        assert max(stream.gaps_s) < 30.0
        held = [(await node.status())["held"] for node in case.of("decode")]
        assert sum(map(bool, held)) == 1, "the blocks that it may still write are kept"
        world.thaw(writer.name)
        await case.repair()

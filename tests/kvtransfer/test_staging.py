"""The room in which a memory's KV is converted."""

import asyncio
import threading
from typing import Any

import pytest

from core.kv import KVLayout, KVShard, RankPool
from core.messages import RegionKey
from kvtransfer import staging
from kvtransfer.copies import Side, plan_vectors
from kvtransfer.staging import HostStaging
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackSender
from tests.patience import PATIENCE_S, until


def shard(dtype: str) -> KVShard:
    return KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype=dtype))


async def test_a_slot_belongs_to_a_conversion_until_its_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another write must not use the slot of one that was cancelled while a thread still writes there."""
    ours, theirs = shard("bfloat16"), shard("float32")
    memory = memoryview(bytearray(ours.pool_bytes(2) + 400))
    begun, may_end, convert = threading.Event(), threading.Event(), staging.convert

    def slowly(*args: Any) -> Any:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        return convert(*args)

    monkeypatch.setattr(staging, "convert", slowly)
    runs = plan_vectors(
        Side(shard=ours, num_blocks=2, block_ids=(0,)), Side(shard=theirs, num_blocks=2, block_ids=(1,)), 0, 4
    )
    sender = LoopbackSender(LoopbackFabric(), memory)
    region = RegionKey(
        transport="loopback", endpoint="there", name="pool", host="h", shard=theirs, num_blocks=2
    )
    room = HostStaging(memory, ours.pool_bytes(2))
    push = asyncio.create_task(room.push(sender, "g", region, runs, RankPool(shard=ours, num_blocks=2), ()))
    await until(begun.is_set)
    push.cancel()
    await asyncio.sleep(0.02)
    assert not push.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await push

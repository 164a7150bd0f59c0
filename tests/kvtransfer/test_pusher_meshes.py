"""Every rank of the writer to every rank of the holder, whatever the two meshes: through the real pusher, inbox and grants."""

import asyncio
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import KVLayout, KVShard, RankPool, lay_out, memory_bytes, num_blocks_for
from core.messages import Commit
from kvtransfer.inbox import Inbox
from kvtransfer.memory import OwnMemory
from kvtransfer.pusher import Pusher
from kvtransfer.staging import Staging
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackReceiver, LoopbackSender
from tests.kvtransfer.test_pusher import BLOCKS, DIM, FIRST, HEADS, LAYERS, FakeMail, until, works

STAGES = [[(0, 3)], [(0, 1), (1, 3)], [(0, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)]]
RANKS = [[(0, 2)], [(0, 1), (1, 2)], [(0, 1), (0, 1), (1, 2)], [(0, 1), (0, 1), (1, 2), (1, 2)]]
"""The last two hold copies, as more ranks than KV heads do."""


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mesh_writes_into_any_other(data: st.DataObject) -> None:
    asyncio.run(_any_mesh(data))


async def _any_mesh(data: st.DataObject) -> None:
    dtypes = data.draw(st.sampled_from([("float32", "float32"), ("float32", "bfloat16")]))
    one_host = dtypes[0] != dtypes[1]
    """What converts does so in its own memory."""
    sides = [
        draw_pools(data, dtype, size, num_hosts)
        for dtype, size, num_hosts in zip(
            dtypes, data.draw(st.permutations((2, 4))), (1 if one_host else 2, 2), strict=True
        )
    ]
    ours, theirs = sides
    firsts = [data.draw(st.sampled_from([pool.first_block for pool in side])) for side in sides]
    """The first block of the group that has the sequence."""
    rng, num_tokens = random.Random(data.draw(st.integers(0, 99))), 11
    end = memory_bytes(ours)
    sources = [memoryview(bytearray(memory_bytes(ours, host) + 400)) for host in range(2)]
    targets = [memoryview(bytearray(memory_bytes(theirs, host) + 1)) for host in range(2)]
    local = [
        rng.sample(range(BLOCKS), num_blocks_for(num_tokens, s[0].shard.layout.block_size)) for s in sides
    ]
    blocks = [[first + block for block in own] for first, own in zip(firsts, local, strict=True)]
    kv = torch.randint(
        1, 200, (LAYERS, 2, HEADS, num_tokens, DIM), generator=torch.Generator().manual_seed(1)
    )
    for pool in ours:
        view, size = vectors(pool, sources[pool.memory]), pool.shard.layout.block_size
        for token in range(num_tokens):
            (first, last), (low, high) = pool.shard.layers, pool.shard.heads
            there = view[:, local[0][token // size], :, :, token % size]
            there[:] = kv[first:last, :, low:high, token] if pool.first_block == firsts[0] else -1
    fabric, completed = LoopbackFabric(), list[Commit]()
    whole = KVShard.whole(theirs[0].shard.layout)
    remote = OwnMemory([pool for pool in theirs if pool.memory])
    inbox = Inbox(
        whole,
        BLOCKS,
        "decode",
        "d1",
        on_complete=completed.append,
        on_corrupted=lambda _: None,
        pools=theirs,
        remote=[remote],
    )
    arrived: list[int] = []

    def on_arrived(grant_id: str, num_bytes: int) -> None:
        arrived.append(num_bytes)
        inbox.arrived(grant_id, num_bytes)

    receivers = [
        LoopbackReceiver(fabric, f"decode{host}", targets[host], memory.may_write, on_arrived)
        for host, memory in enumerate((inbox, remote))
    ]
    inbox.attach(receivers[:1])
    remote.attach(receivers[1:])
    grant = inbox.open("r#0", 0, "prefill", blocks[1], first_token=0, num_tokens=num_tokens, ttl_s=60)
    mail = FakeMail()
    pusher = Pusher(
        KVShard.whole(ours[0].shard.layout),
        BLOCKS,
        mail,
        [LoopbackSender(fabric, sources[0])],
        staging=Staging(sources[0], end),
        pools=ours,
        remote_senders=[] if one_host else [[LoopbackSender(fabric, sources[1])]],
    )
    pusher.open(grant, lambda _: None, lambda _: None, lambda _, why: pytest.fail(why))
    for start, count in ((0, 5), (5, 6)):
        done = pusher.step_started(works(grant, blocks[0], start, count))
        for rank, pool in enumerate(ours):
            for layer in range(*pool.shard.layers):
                done(rank, layer)
    pusher.finish(grant.id, [FIRST])
    inbox.committed(next(message for message in mail.sent if isinstance(message, Commit)))
    await until(lambda: not pusher.num_open)
    assert [commit.num_bytes for commit in completed] == [sum(arrived)]
    assert not any(receiver.num_refused for receiver in receivers)
    for pool in theirs:
        view, size = vectors(pool, targets[pool.memory]), pool.shard.layout.block_size
        (first, last), (low, high) = pool.shard.layers, pool.shard.heads
        for token in range(num_tokens if pool.first_block == firsts[1] else 0):
            place = view[:, local[1][token // size], :, :, token % size]
            assert torch.equal(place, kv[first:last, :, low:high, token].to(place.dtype))
            place.zero_()
        assert not view.any(), "nothing else is touched"
    await pusher.close()


def draw_pools(data: st.DataObject, dtype: str, size: int, num_hosts: int) -> tuple[RankPool, ...]:
    """The pools of a mesh; perhaps of two groups of ranks that hold other blocks, cut alike; ranks on any of the hosts."""
    shards = [
        KVShard(
            KVLayout(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, block_size=size, dtype=dtype),
            layers,
            heads,
        )
        for layers in data.draw(st.sampled_from(STAGES))
        for heads in data.draw(st.sampled_from(RANKS))
    ]
    num_groups = data.draw(st.sampled_from([1, 2]))
    hosts = [data.draw(st.integers(0, num_hosts - 1)) for _ in range(len(shards) * num_groups)]
    return lay_out(shards * num_groups, BLOCKS, [g for g in range(num_groups) for _ in shards], hosts)


def vectors(pool: RankPool, memory: memoryview) -> torch.Tensor:
    """(layer, block, K|V, head, slot, dim) of one rank; small whole numbers are exact in both dtypes, so that bits compare."""
    shard = pool.shard
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=pool.num_bytes, offset=pool.base_bytes)
    shape = (shard.num_layers, BLOCKS, 2, shard.num_heads, shard.layout.block_size, DIM)
    return raw.view(getattr(torch, shard.layout.dtype)).view(shape)

"""Every rank of the writer to every rank of the holder, whatever the two meshes: through the real pusher, inbox and grants."""

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import KVLayout, KVShard, RankPool, lay_out, memory_bytes, num_blocks_for
from core.messages import Commit, Grant
from kvtransfer.inbox import Inbox
from kvtransfer.memory import OwnMemory
from kvtransfer.pusher import Pusher
from kvtransfer.staging import HostStaging
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackReceiver, LoopbackSender
from tests.kvtransfer.test_pusher import BLOCKS, DIM, FIRST, HEADS, LAYERS, FakeMail, works
from tests.patience import until

STAGES = [[(0, 3)], [(0, 1), (1, 3)], [(0, 2), (2, 3)], [(0, 1), (1, 2), (2, 3)]]
RANKS = [[(0, 2)], [(0, 1), (1, 2)], [(0, 1), (0, 1), (1, 2)], [(0, 1), (0, 1), (1, 2), (1, 2)]]
"""The last two hold copies, as more ranks than KV heads do."""
NUM_TOKENS = 11


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mesh_writes_into_any_other(data: st.DataObject) -> None:
    asyncio.run(_any_mesh(data))


async def _any_mesh(data: st.DataObject) -> None:
    dtypes = data.draw(st.sampled_from([("float32", "float32"), ("float32", "bfloat16")]))
    sizes = data.draw(st.permutations((2, 4)))
    pools = [draw_pools(data, dtype, size, 2) for dtype, size in zip(dtypes, sizes, strict=True)]
    firsts = [data.draw(st.sampled_from([pool.first_block for pool in side])) for side in pools]
    rng = random.Random(data.draw(st.integers(0, 99)))
    writer, holder = (
        Side(own, first, rng, num_beyond)
        for own, first, num_beyond in zip(pools, firsts, (400, 1), strict=True)
    )
    kv = torch.randint(
        1, 200, (LAYERS, 2, HEADS, NUM_TOKENS, DIM), generator=torch.Generator().manual_seed(1)
    )
    writer.write(kv)
    fabric = LoopbackFabric()
    receiving = Receiving(holder, fabric)
    grant = receiving.inbox.open(
        "r#0", 0, "prefill", holder.blocks, first_token=0, num_tokens=NUM_TOKENS, ttl_s=60
    )
    await push(writer, fabric, grant, receiving.inbox.committed)
    assert [commit.num_bytes for commit in receiving.completed] == [sum(receiving.arrived)]
    assert not any(receiver.num_refused for receiver in receiving.receivers)
    holder.check(kv)


class Side:
    """One of the two instances: its ranks' pools, its hosts' memory, and the blocks that the sequence has there."""

    def __init__(
        self, pools: tuple[RankPool, ...], first_block: int, rng: random.Random, num_beyond: int
    ) -> None:
        """`first_block` is that of the group of ranks that has the sequence, `num_beyond` the bytes behind each host's pools."""
        self.pools, self.first_block = pools, first_block
        self.memories = [memoryview(bytearray(memory_bytes(pools, host) + num_beyond)) for host in range(2)]
        num_blocks = num_blocks_for(NUM_TOKENS, pools[0].shard.layout.block_size)
        self.local = rng.sample(range(BLOCKS), num_blocks)
        """The blocks as the group's own ranks number them."""
        self.blocks = [first_block + block for block in self.local]

    def write(self, kv: torch.Tensor) -> None:
        """Put the sequence's KV where its group's ranks have it, and something else where other groups do."""
        for pool in self.pools:
            for token, place in self.places(pool):
                place[:] = part_of(pool, kv, token) if pool.first_block == self.first_block else -1

    def check(self, kv: torch.Tensor) -> None:
        for pool in self.pools:
            for token, place in self.places(pool) if pool.first_block == self.first_block else ():
                assert torch.equal(place, part_of(pool, kv, token).to(place.dtype))
                place.zero_()
            assert not vectors(pool, self.memories[pool.memory]).any(), "nothing else is touched"

    def places(self, pool: RankPool) -> Iterator[tuple[int, torch.Tensor]]:
        """(token, where a rank keeps its vectors) of the sequence."""
        view, size = vectors(pool, self.memories[pool.memory]), pool.shard.layout.block_size
        for token in range(NUM_TOKENS):
            yield token, view[:, self.local[token // size], :, :, token % size]


class Receiving:
    """The holder's inbox, with a receiver on each of its hosts."""

    def __init__(self, side: Side, fabric: LoopbackFabric) -> None:
        self.completed, self.arrived = list[Commit](), list[int]()
        remote = OwnMemory([pool for pool in side.pools if pool.memory])
        self.inbox = Inbox(
            KVShard.whole(side.pools[0].shard.layout),
            BLOCKS,
            "decode",
            "d1",
            on_complete=self.completed.append,
            on_corrupted=lambda _: None,
            pools=side.pools,
            remote=[remote],
        )
        self.receivers = [
            LoopbackReceiver(fabric, f"decode{host}", side.memories[host], memory.may_write, self.on_arrived)
            for host, memory in enumerate((self.inbox, remote))
        ]
        self.inbox.attach(self.receivers[:1])
        remote.attach(self.receivers[1:])

    def on_arrived(self, grant_id: str, num_bytes: int) -> None:
        self.arrived.append(num_bytes)
        self.inbox.arrived(grant_id, num_bytes)


async def push(writer: Side, fabric: LoopbackFabric, grant: Grant, hear: Callable[[Commit], None]) -> None:
    """Compute the sequence in two steps and send its KV. `hear` is called with what the writer says at its end."""
    here, mail = writer.memories[0], FakeMail()
    pusher = Pusher(
        KVShard.whole(writer.pools[0].shard.layout),
        BLOCKS,
        mail,
        [LoopbackSender(fabric, here)],
        staging=HostStaging(here, memory_bytes(writer.pools)),
        pools=writer.pools,
        remote_senders=[[LoopbackSender(fabric, writer.memories[1])]],
        remote_staging=[HostStaging(writer.memories[1], memory_bytes(writer.pools, 1))],
    )
    pusher.open(grant, lambda _: None, lambda _: None, lambda _, why: pytest.fail(why))
    for start, count in ((0, 5), (5, 6)):
        done = pusher.step_started(works(grant, writer.blocks, start, count))
        assert done is not None
        for rank, pool in enumerate(writer.pools):
            for layer in range(*pool.shard.layers):
                done(rank, layer)
    pusher.finish(grant.id, [FIRST])
    hear(next(message for message in mail.sent if isinstance(message, Commit)))
    await until(lambda: not pusher.num_open)
    await pusher.close()


def part_of(pool: RankPool, kv: torch.Tensor, token: int) -> torch.Tensor:
    (first, last), (low, high) = pool.shard.layers, pool.shard.heads
    return kv[first:last, :, low:high, token]


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

"""The pusher between pools that differ: storage, block size and cuts; order by deadline; what does not fit is refused."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from core.errors import ReplicaLost, TransferError
from core.kv import KVLayout, KVShard, lay_out, num_blocks_for
from core.messages import ChunkDone, Commit, Grant, Message, PrefillFailed, RegionKey
from core.plan import KVPush, SeqWork, StepPlan
from core.types import TokenOut
from kvtransfer.copies import CopyRun
from kvtransfer.inbox import Inbox
from kvtransfer.pusher import MAX_WRITES, Pusher
from kvtransfer.staging import HostStaging
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackReceiver, LoopbackSender
from kvtransfer.wire import content_of, pack
from tests.patience import until

LAYERS, HEADS, DIM, BLOCKS = 3, 2, 8, 12
FIRST = TokenOut(request_id="r", attempt=0, index=0, token=7)


@dataclass
class FakeMail:
    address: str = "prefill"
    sent: list[Message] = field(default_factory=list)

    def listen(self, on_message: Callable[[str, Message], None], on_lost: Callable[[str], None]) -> None: ...
    async def close(self) -> None: ...

    def send(self, to: str, message: Message) -> None:
        self.sent.append(message)


def shard(dtype: str = "float32", scales: str = "none", block_size: int = 4) -> KVShard:
    return KVShard.whole(
        KVLayout(
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=DIM,
            block_size=block_size,
            dtype=dtype,
            scales=scales,
        )
    )


def read(side: KVShard, pool: memoryview, blocks: Sequence[int], num_tokens: int) -> np.ndarray:
    """(layer, K|V, head, token, dim) float32 of a sequence, read by torch."""
    size, layout = side.layout.block_size, side.layout
    kind = getattr(torch, layout.dtype)
    data = torch.frombuffer(pool[: side.data_bytes(BLOCKS)], dtype=torch.uint8).view(kind).float()
    array = data.reshape(LAYERS, BLOCKS, 2, HEADS, size, DIM)
    if layout.scales == "vector":
        scales = torch.frombuffer(pool[side.data_bytes(BLOCKS) :], dtype=torch.float32)
        array = array * scales.reshape(LAYERS, BLOCKS, 2, HEADS, size, 1)
    picked = array[:, list(blocks)].permute(0, 2, 3, 1, 4, 5).reshape(LAYERS, 2, HEADS, -1, DIM)
    return picked[:, :, :, :num_tokens].numpy()


def works(grant: Grant, blocks: Sequence[int], start: int, count: int) -> StepPlan:
    work = SeqWork(
        key="r",
        start=start,
        count=count,
        block_ids=tuple(blocks),
        samples=False,
        push=KVPush(grant.id, start, count),
    )
    return StepPlan(step=0, new=(), copies=(), work=(work,), drop=())


@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    [
        (shard(), shard("bfloat16", block_size=2), 2**-8),
        (shard("bfloat16"), shard(block_size=8), 0),
        (shard("bfloat16"), shard("float8_e4m3fn", "vector"), 2**-4),
        (shard("bfloat16"), shard("float8_e4m3fn"), 2**-4),
        (shard(), shard("int8", "vector", 3), 2**-7),
        (shard("int8", "vector"), shard("int8", "vector", 2), 0),
        (shard("int8", "vector"), shard(), 0),
    ],
)
async def test_a_sequence_arrives_in_the_holders_storage_and_nothing_else_changes(
    ours: KVShard, theirs: KVShard, tolerance: float
) -> None:
    rng = random.Random(3)
    num_tokens = 11
    source = memoryview(bytearray(ours.pool_bytes(BLOCKS) + 400))  # a small room: many slots' worth
    fill(ours, source)
    target = memoryview(bytearray(theirs.pool_bytes(BLOCKS)))
    fabric = LoopbackFabric()
    completed: list[Commit] = []
    inbox = Inbox(theirs, BLOCKS, "decode", "d1", on_complete=completed.append, on_corrupted=lambda _: None)
    receiver = LoopbackReceiver(fabric, "decode", target, inbox.may_write, inbox.arrived)
    inbox.attach([receiver])
    theirs_blocks = rng.sample(range(BLOCKS), num_blocks_for(num_tokens, theirs.layout.block_size))
    ours_blocks = rng.sample(range(BLOCKS), num_blocks_for(num_tokens, ours.layout.block_size))
    grant = inbox.open("r#0", 0, "prefill", theirs_blocks, first_token=0, num_tokens=num_tokens, ttl_s=60)
    mail = FakeMail()
    staging = HostStaging(source, ours.pool_bytes(BLOCKS))
    pusher = Pusher(ours, BLOCKS, mail, [LoopbackSender(fabric, source)], staging=staging)
    pusher.open(grant, lambda _: None, lambda _: None, lambda _, why: pytest.fail(why))
    for start, count in ((0, 5), (5, 6)):
        done = pusher.step_started(works(grant, ours_blocks, start, count))
        for layer in range(LAYERS):
            done(0, layer)
    pusher.finish(grant.id, [FIRST])
    commit = next(message for message in mail.sent if isinstance(message, Commit))
    inbox.committed(commit)
    await until(lambda: not pusher.num_open)
    assert sum(isinstance(message, ChunkDone) for message in mail.sent) == commit.num_chunks == 2
    assert receiver.num_refused == 0
    assert completed == [commit], "the writer's count and the holder's agree"
    sent = read(ours, source[: ours.pool_bytes(BLOCKS)], ours_blocks, num_tokens)
    got = read(theirs, target, theirs_blocks, num_tokens)
    largest = np.abs(sent).max(axis=-1, keepdims=True)
    assert np.all(np.abs(got - sent) <= tolerance * largest + 1e-9)
    everything = read(theirs, target, range(BLOCKS), BLOCKS * theirs.layout.block_size)
    size = theirs.layout.block_size
    written = {
        (block * size + slot)
        for i, block in enumerate(theirs_blocks)
        for slot in range(size)
        if i * size + slot < num_tokens
    }
    others = [token for token in range(BLOCKS * size) if token not in written]
    assert not everything[:, :, :, others].any()
    await pusher.close()


def fill(side: KVShard, pool: memoryview) -> None:
    rng = np.random.default_rng(1)
    num_vectors = LAYERS * BLOCKS * side.block_vectors
    kind = getattr(torch, side.layout.dtype)
    values = torch.from_numpy(rng.standard_normal((num_vectors, DIM)).astype(np.float32))
    stored = (values * 40).round().clamp(-127, 127).to(kind) if kind is torch.int8 else values.to(kind)
    data = stored.view(torch.uint8).numpy().tobytes()
    pool[: len(data)] = data
    if side.layout.scales == "vector":
        scales = (rng.random(num_vectors) + 0.5).astype(np.float32).tobytes()
        pool[len(data) : len(data) + len(scales)] = scales


class Gate:
    """A sender whose writes wait to be let through; it records whose they were."""

    name, vouches = "gate", False

    def __init__(self) -> None:
        self.order: list[tuple[str, int]] = []
        self.open = asyncio.Semaphore(0)

    def reaches(self, region: RegionKey) -> bool:
        return True

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        self.order.append((grant_id, sum(run.num_bytes for run in runs)))
        await self.open.acquire()

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        return num_bytes

    def ended(self, grant_id: str) -> None: ...
    def forget(self, endpoint_owner: str) -> None: ...
    async def close(self) -> None: ...


async def tell_of_layers(done: Callable[[int, int], None], gate: Gate) -> None:
    """Each is a write of its own: the one before has begun, as long as so many may."""
    for layer in range(LAYERS):
        done(0, layer)
        await until(lambda told=layer + 1: len(gate.order) == min(told, MAX_WRITES))


def grant_of(name: str, theirs: KVShard, block: int, content: bytes = b"") -> Grant:
    region = RegionKey(
        transport="gate",
        endpoint="h:1",
        name="baton-kv-1",
        host="",
        shard=theirs,
        num_blocks=BLOCKS,
        content=content,
    )
    return Grant(
        id=name,
        key=name,
        epoch=0,
        holder="decode",
        incarnation="d1",
        regions=(region,),
        block_ids=(block,),
        first_token=0,
        num_tokens=4,
        ttl_s=60,
    )


async def test_the_request_that_is_due_first_overtakes_at_the_next_layer() -> None:
    gate = Gate()
    pusher = Pusher(shard(), BLOCKS, FakeMail(), [gate])
    late, soon = grant_of("late", shard(), 1), grant_of("soon", shard(), 2)
    for grant, due_at in ((late, 9.0), (soon, 1.0)):
        pusher.open(grant, lambda _: None, lambda _: None, lambda _, why: pytest.fail(why), (0.0, due_at))
    done = pusher.step_started(works(late, (1,), 0, 4))
    await tell_of_layers(done, gate)
    done = pusher.step_started(works(soon, (2,), 0, 4))
    for layer in range(LAYERS):
        done(0, layer)
    await asyncio.sleep(0.01)
    assert len(gate.order) == MAX_WRITES
    for _ in range(4):
        gate.open.release()
    await until(lambda: len(gate.order) == 4)
    size = shard().block_bytes
    assert gate.order == [("late", size), ("late", size), ("soon", 3 * size), ("late", size)]
    await pusher.close()


async def test_what_does_not_fit_is_refused_before_anything_is_computed() -> None:
    pusher = Pusher(shard(), BLOCKS, FakeMail(), [Gate()], model="rev1")
    ignore = (lambda _: None, lambda _: None, lambda *_: None)
    with pytest.raises(TransferError, match="no room to convert"):
        pusher.open(grant_of("a", shard("bfloat16"), 1), *ignore)
    with pytest.raises(
        TransferError, match=r"revision is rev1 on prefill prefill .* and rev2 on decode decode"
    ):
        pusher.open(grant_of("b", shard(), 1, pack(content_of(shard(), "rev2"))), *ignore)
    pusher.open(
        grant_of("c", shard(), 1, pack(replace(content_of(shard(), "rev1"), software="old"))), *ignore
    )
    assert pusher.num_open == 1
    await pusher.close()


async def test_the_commit_does_not_wait_for_the_writes_and_what_they_read_does() -> None:
    gate, mail = Gate(), FakeMail()
    pusher = Pusher(shard(), BLOCKS, mail, [gate])
    grant = grant_of("g", shard(), 1)
    delivered: list[str] = []
    pusher.open(grant, delivered.append, lambda _: None, lambda _, why: pytest.fail(why))
    done = pusher.step_started(works(grant, (1,), 0, 4))
    await tell_of_layers(done, gate)
    pusher.finish("g", [FIRST])
    assert mail.sent == [
        Commit(grant_id="g", num_chunks=1, num_bytes=LAYERS * shard().block_bytes, first=FIRST, times=ANY)
    ]
    for num_left in (3, 2, 1):
        await asyncio.sleep(0.01)
        assert not delivered, f"{num_left} writes still read the blocks"
        gate.open.release()
    await until(lambda: delivered == ["g"])
    assert len(gate.order) == 3
    assert [type(message) for message in mail.sent] == [Commit, ChunkDone]
    await pusher.close()


async def test_what_is_sent_of_a_step_that_is_taken_back_counts_and_is_waited_for() -> None:
    gate, mail = Gate(), FakeMail()
    gate.vouches = True
    pusher = Pusher(shard(), BLOCKS, mail, [gate])
    grant, idle = grant_of("g", shard(), 1), asyncio.Event()
    pusher.open(grant, lambda _: None, lambda _: None, lambda _, why: pytest.fail(why))
    pusher.step_started(works(grant, (1,), 0, 4))(0, 0)
    pusher.when_idle("g", idle.set)
    await until(lambda: bool(gate.order))
    assert not idle.is_set(), "a write still reads the blocks"
    gate.open.release()
    await idle.wait()
    done = pusher.step_started(works(grant, (1,), 0, 4))
    for layer in range(LAYERS):
        done(0, layer)
        gate.open.release()
    pusher.finish("g", [FIRST])
    await until(lambda: not pusher.num_open)
    chunks = [message for message in mail.sent if isinstance(message, ChunkDone)]
    (commit,) = (message for message in mail.sent if isinstance(message, Commit))
    assert [chunk.num_bytes // shard().block_bytes for chunk in chunks] == [1, LAYERS]
    assert (commit.num_chunks, commit.num_bytes) == (2, (1 + LAYERS) * shard().block_bytes)
    await pusher.close()


async def test_of_two_writes_that_fail_the_first_says_so() -> None:
    gate, mail = Gate(), FakeMail()

    async def fail(grant_id: str, *_: object) -> None:
        gate.order.append((grant_id, 0))
        await gate.open.acquire()
        raise ReplicaLost("the link broke")

    gate.write = fail  # type: ignore[method-assign]
    pusher = Pusher(shard(), BLOCKS, mail, [gate])
    grant = grant_of("g", shard(), 1)
    failed, quiet = list[str](), list[str]()

    def on_failed(grant_id: str, why: str) -> None:
        failed.append(why)
        pusher.stop(grant_id, reason=why)

    pusher.open(grant, lambda _: pytest.fail("nothing was delivered"), quiet.append, on_failed)
    done = pusher.step_started(works(grant, (1,), 0, 4))
    await tell_of_layers(done, gate)
    gate.open.release()
    await until(lambda: bool(failed))
    assert not quiet, "the other write still reads the blocks"
    gate.open.release()
    await until(lambda: quiet == ["g"])
    assert failed == ["the link broke"]
    assert mail.sent == [PrefillFailed("g", "the link broke")]
    await pusher.close()


async def test_a_grant_that_is_stopped_sends_nothing_more_and_says_why() -> None:
    gate, mail = Gate(), FakeMail()
    pusher = Pusher(shard(), BLOCKS, mail, [gate])
    quiet: list[str] = []
    pusher.open(grant_of("g", shard(), 1), lambda _: None, quiet.append, lambda *_: None)
    done = pusher.step_started(works(grant_of("g", shard(), 1), (1,), 0, 4))
    done(0, 0)
    await until(lambda: len(gate.order) == 1)
    done(0, 1)
    pusher.stop("g", reason="enough")
    await asyncio.sleep(0.01)
    assert not quiet, "a write is still reading the blocks"
    gate.open.release()
    await until(lambda: quiet == ["g"])
    assert len(gate.order) == 1
    assert mail.sent == [PrefillFailed("g", "enough")]
    await pusher.close()


async def test_ranks_that_hold_the_same_share_the_holders_ranks() -> None:
    latent = KVShard.whole(
        KVLayout(num_layers=LAYERS, num_kv_heads=1, head_dim=DIM, block_size=4, dtype="bfloat16", state="mla")
    )
    regions = tuple(
        RegionKey(
            transport="gate",
            endpoint=f"h:{rank}",
            name="baton-kv-1",
            host="",
            shard=latent,
            num_blocks=BLOCKS,
            rank=rank,
        )
        for rank in range(4)
    )
    pools = lay_out((latent, latent), BLOCKS)
    written: list[tuple[str, int]] = []
    gate, mail = Gate(), FakeMail()

    async def record(grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        for run in runs:
            reader = [rank for rank, pool in enumerate(pools) if pool.blocks_at(run.source, run.source + 1)]
            written.append((region.endpoint, *reader))
            assert run.num_bytes == 4 * DIM * 2

    gate.write = record  # type: ignore[method-assign]
    pusher = Pusher(latent, BLOCKS, mail, [gate], pools=pools)
    grant = Grant(
        id="g",
        key="g",
        epoch=0,
        holder="decode",
        incarnation="d1",
        regions=regions,
        block_ids=(1,),
        first_token=0,
        num_tokens=4,
        ttl_s=60,
    )
    pusher.open(grant, lambda _: None, lambda _: None, lambda _, why: pytest.fail(why))
    done = pusher.step_started(works(grant, (1,), 0, 4))
    for layer in range(LAYERS):
        done(0, layer)
    await until(lambda: len(written) == 2 * LAYERS)
    assert not mail.sent, "the other rank is not done"
    for layer in range(LAYERS):
        done(1, layer)
    pusher.finish("g", [FIRST])
    await until(lambda: not pusher.num_open)
    assert sum(isinstance(message, ChunkDone) for message in mail.sent) == 1
    assert Counter(written) == {(f"h:{rank}", rank % 2): LAYERS for rank in range(4)}
    await pusher.close()

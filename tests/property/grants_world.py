"""The two sides of a hand-over whose every step is an event that a test chooses: production workers over modelled engines, pushers and
pools."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from core.errors import RequestError
from core.kv import KVLayout, KVShard
from core.messages import Commit, Drained, Grant, Message, PrefillFailed, RegionKey
from core.types import Request, TokenOut
from engine.planning.planned_reservations import Reservation
from prefill.prefill_worker import PrefillWorker

SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32"))
NUM_BLOCKS = 8
PROMPT = tuple(range(10))
BLOCKS_EACH = 3
WRITES = 2
"""Writes that fill a grant."""


class World(Protocol):
    """What a writer and the holder's pool know of everything else."""

    memory: "Memory"
    bag: dict[tuple[str, str], deque[Message]]
    writers: dict[str, "Writer"]

    def may_write(self, grant_id: str, start: int, end: int) -> bool: ...

    def check_write(self, push: "Push") -> None: ...

    def arrived(self, grant_id: str) -> None: ...

    def post_chunk(self, push: "Push") -> None: ...


class ManualClock:
    """Sleeps end when the test says so: any timeout may come before any other event."""

    def __init__(self) -> None:
        self.sleeps: list[asyncio.Future[None]] = []

    def now(self) -> float:
        return 0.0

    async def sleep(self, delay_s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleeps.append(future)
        try:
            await future
        finally:
            self.sleeps.remove(future)


class Post:
    """core.ports.Mail into a bag that the test empties."""

    def __init__(self, address: str, bag: dict[tuple[str, str], deque[Message]]) -> None:
        self.address, self._bag = address, bag

    def send(self, to: str, message: Message) -> None:
        self._bag.setdefault((self.address, to), deque()).append(message)


class Engine:
    """Blocks and who has them: a key in `reserved` waits for its KV, one in `computing` is decode's own."""

    def __init__(self) -> None:
        self.free = set(range(NUM_BLOCKS))
        self.reserved: dict[str, tuple[int, ...]] = {}
        self.computing: dict[str, tuple[int, ...]] = {}
        self.pushed: set[str] = set()

    def reserve(self, request: Request) -> "asyncio.Future[Reservation]":
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        if len(self.free) >= BLOCKS_EACH:  # else it waits for good: the test cancels it
            blocks = tuple(sorted(self.free)[:BLOCKS_EACH])
            self.free -= set(blocks)
            self.reserved[request.key] = blocks
            future.set_result(
                Reservation(key=request.key, block_ids=blocks, matched_tokens=0, num_tokens=len(PROMPT))
            )
        return future

    def activate(self, reservation: Reservation, sampled: list[TokenOut]) -> None:
        self.computing[reservation.key] = self.reserved.pop(reservation.key)

    def compute(self, reservation: Reservation) -> None:
        self.computing[reservation.key] = self.reserved.pop(reservation.key)

    def release(self, key: str) -> None:
        self.free |= set(self.reserved.pop(key, ()))
        self.pushed.discard(key)

    def hold(self, key: str) -> None:
        pass

    def has_room(self, key: str) -> bool:
        return True

    def abort(self, key: str) -> None:
        self.free |= set(self.computing.pop(key, ()))

    def add(self, request: Request, *, push: Grant | None = None) -> None:
        if request.key in self.pushed:
            raise RequestError(f"request {request.key} is already here")  # as the real one
        if push is not None:
            self.pushed.add(request.key)


@dataclass(kw_only=True)
class Push:
    grant: Grant
    delivered: Callable[[str], None]
    quiet: Callable[[str], None]
    left: int = WRITES
    first: TokenOut | None = None
    stopped: bool = False
    reason: str | None = None
    claimed: bool = False


class Writer:
    """A prefill instance: the production worker over a pusher whose every write is an event of the test."""

    def __init__(self, name: str, world: World) -> None:
        self.name, self.world = name, world
        self.alive = True
        self.pushes: dict[str, Push] = {}
        self.mail = Post(name, world.bag)
        self.died = asyncio.Event()
        self.engine = Engine()
        self.worker = PrefillWorker(self.mail, self, self.engine, self.engine)  # type: ignore[arg-type]

    def open(self, grant: Grant, delivered: Any, quiet: Any, failed: Any, due_at: float) -> None:
        self.pushes[grant.id] = Push(grant=grant, delivered=delivered, quiet=quiet)

    def finish(self, grant_id: str, sampled: list[TokenOut]) -> None:
        """Its writes may come before and after."""
        if (push := self.pushes.get(grant_id)) is not None and not push.stopped and push.first is None:
            push.first = sampled[0]
            self.mail.send(
                push.grant.holder, Commit(grant_id=grant_id, num_chunks=1, num_bytes=WRITES, first=sampled[0])
            )

    def remaining_s(self, grant_id: str) -> float:
        return 0.0

    def stop(self, grant_id: str, *, reason: str | None = None) -> None:
        if (push := self.pushes.get(grant_id)) is not None and not push.stopped:
            push.stopped, push.reason = True, reason

    def holder_lost(self, holder: str) -> None:
        pass

    def may_write(self, grant_id: str) -> bool:
        """Could a write of it still reach the pool, whatever anybody believes?"""
        push = self.pushes.get(grant_id)
        return self.alive and push is not None and self.world.memory.lets_in(self, push)

    def write(self, push: Push) -> None:
        memory = self.world.memory
        if push.left and not push.stopped and memory.claim(push):
            push.left -= 1
            memory.wrote(push)

    def end(self, push: Push) -> None:
        """Its writes are over."""
        grant = push.grant
        if not push.stopped and (push.first is None or push.left):
            return
        del self.pushes[grant.id]
        if push.stopped:
            self.mail.send(
                grant.holder, PrefillFailed(grant.id, push.reason) if push.reason else Drained(grant.id)
            )
            push.quiet(grant.id)
        else:
            push.delivered(grant.id)


class Memory:
    """The holder's pool as a Receiver. `checked`: every write is checked as it comes (TCP), else once, by a claim (shared memory)."""

    def __init__(self, world: World, checked: bool) -> None:
        self.world, self.checked = world, checked
        self.taken_back: set[str] = set()
        self.claims: dict[str, str] = {}
        self.cut: set[str] = set()

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        return RegionKey(
            transport="model",
            endpoint="pool",
            name="baton-kv-1",
            host="host",
            shard=shard,
            num_blocks=num_blocks,
        )

    def lets_in(self, writer: Writer, push: Push) -> bool:
        grant_id = push.grant.id
        if self.checked:
            return grant_id not in self.cut and self.world.may_write(grant_id, *self.span(push))
        return grant_id not in self.taken_back and (push.claimed or not push.stopped)

    def span(self, push: Push) -> tuple[int, int]:
        start = push.grant.block_ids[0] * SHARD.block_bytes
        return start, start + 1

    def claim(self, push: Push) -> bool:
        grant_id = push.grant.id
        if self.checked:
            return grant_id not in self.cut and self.world.may_write(grant_id, *self.span(push))
        if grant_id in self.taken_back:
            return False
        push.claimed = True
        return True

    def wrote(self, push: Push) -> None:
        self.world.check_write(push)
        if self.checked:
            self.world.arrived(push.grant.id)
        else:
            self.world.post_chunk(push)

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        then()

    def ended(self, grant_id: str) -> None:
        pass

    async def fence(self, writer: str, grant_id: str) -> None:
        node = self.world.writers[writer]
        push = node.pushes.get(grant_id)
        if self.checked:
            self.cut.add(grant_id)
        elif push is None or not push.claimed:
            self.taken_back.add(grant_id)
        else:
            await node.died.wait()

    async def close(self) -> None:
        pass


class Reporter:
    scheduler = "scheduler"

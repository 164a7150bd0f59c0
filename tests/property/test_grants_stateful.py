"""Model checking of grants and hand-off: the production workers and ledger under every order of messages, deaths and timeouts.

Hypothesis chooses what happens next; messages may be doubled, reordered and lost (losing one cuts the pair, as mail does). After
each event: no block is writable by two, and none that is free, or that decode computes in, is writable by anybody."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.config import TransferConfig
from core.errors import RequestError
from core.kv import KVLayout, KVShard, RankPool
from core.messages import (
    ChunkDone,
    Commit,
    Drained,
    Grant,
    Message,
    PrefillAssigned,
    PrefillFailed,
    RegionKey,
    Submit,
)
from core.types import FinishReason, Request, Route, SamplingParams, TokenOut
from decode.worker import DecodeWorker
from engine.ledger import Reservation
from kvtransfer.inbox import Inbox
from kvtransfer.memory import OwnMemory
from prefill.worker import PrefillWorker
from tests.property.late_memory import Act, LateMemory

SHARD = KVShard.whole(KVLayout(1, 1, 4, 4, "float32"))
NUM_BLOCKS = 8
PROMPT = tuple(range(10))
BLOCKS_EACH = 3
WRITES = 2
"""Writes that fill a grant."""
DEPTH = 60


class ManualClock:
    """Sleeps end when the machine says so: any timeout may come before any other event."""

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
    """core.ports.Mail into a bag that the machine empties."""

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
        if len(self.free) >= BLOCKS_EACH:  # else it waits for good: the machine cancels it
            blocks = tuple(sorted(self.free)[:BLOCKS_EACH])
            self.free -= set(blocks)
            self.reserved[request.key] = blocks
            future.set_result(Reservation(request.key, blocks, 0, len(PROMPT)))
        return future

    def activate(self, reservation: Reservation, drawn: list[TokenOut]) -> None:
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


@dataclass
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
    """A prefill instance: the production worker over a pusher whose every write is an event of the machine."""

    def __init__(self, name: str, machine: "Machine") -> None:
        self.name, self.machine = name, machine
        self.alive = True
        self.pushes: dict[str, Push] = {}
        self.mail = Post(name, machine.bag)
        self.died = asyncio.Event()
        self.engine = Engine()
        self.worker = PrefillWorker(self.mail, self)  # type: ignore[arg-type]
        self.worker.engine = self.engine  # type: ignore[assignment]

    def open(self, grant: Grant, delivered: Any, quiet: Any, failed: Any, due_s: float) -> None:
        self.pushes[grant.id] = Push(grant, delivered, quiet)

    def finish(self, grant_id: str, drawn: list[TokenOut]) -> None:
        """Its writes may come before and after."""
        if (push := self.pushes.get(grant_id)) is not None and not push.stopped and push.first is None:
            push.first = drawn[0]
            self.mail.send(push.grant.holder, Commit(grant_id, 1, WRITES, drawn[0]))

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
        return self.alive and push is not None and self.machine.memory.lets_in(self, push)

    def write(self, push: Push) -> None:
        memory = self.machine.memory
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

    def __init__(self, machine: "Machine", checked: bool) -> None:
        self.machine, self.checked = machine, checked
        self.taken_back: set[str] = set()
        self.claims: dict[str, str] = {}
        self.cut: set[str] = set()

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        return RegionKey("model", "pool", "baton-kv-1", "host", shard, num_blocks)

    def lets_in(self, writer: Writer, push: Push) -> bool:
        grant_id = push.grant.id
        if self.checked:
            return grant_id not in self.cut and self.machine.may_write(grant_id, *self.span(push))
        return grant_id not in self.taken_back and (push.claimed or not push.stopped)

    def span(self, push: Push) -> tuple[int, int]:
        start = push.grant.block_ids[0] * SHARD.block_bytes
        return start, start + 1

    def claim(self, push: Push) -> bool:
        grant_id = push.grant.id
        if self.checked:
            return grant_id not in self.cut and self.machine.may_write(grant_id, *self.span(push))
        if grant_id in self.taken_back:
            return False
        push.claimed = True
        return True

    def wrote(self, push: Push) -> None:
        self.machine.check_write(push)
        if self.checked:
            self.machine.arrived(push.grant.id)
        else:
            self.machine.post_chunk(push)

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        then()

    def ended(self, grant_id: str) -> None:
        pass

    async def fence(self, writer: str, grant_id: str) -> None:
        node = self.machine.writers[writer]
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


class Machine(RuleBasedStateMachine):
    checked = True
    far = False
    """The pool lies in the memory of another host."""
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.run(self.build)

    async def build(self) -> None:
        self.bag: dict[tuple[str, str], deque[Message]] = {}
        self.clock, self.memory = ManualClock(), Memory(self, self.checked)
        self.writers = {name: Writer(name, self) for name in ("p0", "p1")}
        pool = RankPool(SHARD, NUM_BLOCKS, memory=int(self.far))
        self.late = LateMemory(OwnMemory([pool]))
        self.late.own.attach([self.memory])  # type: ignore[list-item]
        self.inbox = Inbox(
            SHARD,
            NUM_BLOCKS,
            "d",
            "d",
            lambda commit: self.decode.on_complete(commit),
            lambda grant_id: self.decode.on_corrupted(grant_id),
            pools=[pool],
            far=[self.late] if self.far else [],
        )
        if not self.far:
            self.inbox.attach([self.memory])  # type: ignore[list-item]
        self.engine = Engine()
        self.decode = DecodeWorker(
            Post("d", self.bag),  # type: ignore[arg-type]
            self.clock,
            self.inbox,
            TransferConfig(),
            Reporter(),  # type: ignore[arg-type]
        )
        self.decode.engine = self.engine  # type: ignore[assignment]
        self.count = 0
        self.keys: list[Request] = []

    def run(self, act: Callable[[], Any]) -> None:
        """One event, and all that follows from it at once."""

        async def body() -> None:
            result = act()
            if asyncio.iscoroutine(result):
                await result
            for _ in range(10):
                await asyncio.sleep(0)

        self.loop.run_until_complete(body())

    def may_write(self, grant_id: str, start: int, end: int) -> bool:
        memory = self.late.own if self.far else self.inbox
        return memory.may_write(grant_id, start, end)

    def arrived(self, grant_id: str) -> None:
        """One of a grant's writes is in the pool."""
        if self.far:
            self.late.answers.append(lambda: self.inbox.arrived(grant_id, 1))
        else:
            self.inbox.arrived(grant_id, 1)

    @precondition(lambda self: self.late.words)
    @rule(count=st.integers(1, 4))
    def words_reach_the_memory(self, count: int) -> None:
        for _ in range(min(count, len(self.late.words))):
            self.run(self.late.words.popleft())

    @precondition(lambda self: self.late.answers)
    @rule()
    def answers_reach_the_instance(self) -> None:
        self.pass_on(self.late.answers)

    @precondition(lambda self: self.late.words)
    @rule()
    def all_is_said_and_answered(self) -> None:
        for queue in (self.late.words, self.late.answers):
            self.pass_on(queue)

    def pass_on(self, queue: deque[Act]) -> None:
        while queue:
            self.run(queue.popleft())

    def post_chunk(self, push: Push) -> None:
        writer = next(w for w in self.writers.values() if push.grant.id in w.pushes)
        writer.mail.send("d", ChunkDone(push.grant.id, 0, 0, 1, 1))

    def check_write(self, push: Push) -> None:
        """Bytes have just come into the grant's blocks."""
        key = push.grant.key
        assert self.engine.reserved.get(key) is not None, (
            f"{push.grant.id} writes into blocks that were given away"
        )
        assert set(push.grant.block_ids) <= set(self.engine.reserved[key])

    def deliver_to(self, sender: str, to: str, message: Message) -> None:
        if to == "d":
            self.decode.on_message(sender, message)
        elif to in self.writers and self.writers[to].alive:
            self.writers[to].worker.on_message(sender, message)

    # What may happen ------------------------------------------------------------------------------------------------

    @rule(writer=st.sampled_from(["p0", "p1"]))
    def submit(self, writer: str) -> None:
        request = Request(f"r{self.count}", PROMPT, SamplingParams(max_tokens=4), "frontend")
        self.count += 1
        self.keys.append(request)
        self.run(lambda: self.decode.on_message("frontend", Submit(request, Route("d", writer))))

    @precondition(lambda self: any(self.bag.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(sorted(pair for pair, queue in self.bag.items() if queue)))
        how = data.draw(st.sampled_from(["first", "first", "first", "last", "double"]))
        queue = self.bag[pair]
        message = queue.pop() if how == "last" else queue.popleft()
        if how == "double":
            queue.append(message)
        self.run(lambda: self.deliver_to(*pair, message))

    @precondition(lambda self: any(queue for (_, to), queue in self.bag.items() if to == "scheduler"))
    @rule(answer=st.sampled_from(["p0", "p1", ""]))
    def schedule(self, answer: str) -> None:
        need: Any = self.bag[("d", "scheduler")].popleft()
        told = PrefillAssigned(
            need.request_id, need.attempt, need.epoch, answer if answer != need.lost else ""
        )
        self.run(lambda: self.decode.on_message("scheduler", told))

    @precondition(lambda self: self.pushes())
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        writer, push = data.draw(st.sampled_from(self.pushes()))
        self.run(lambda: writer.write(push))

    @precondition(lambda self: self.pushes())
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        _, push = data.draw(st.sampled_from(self.pushes()))
        request_id, _, attempt = push.grant.key.partition("#")
        token = TokenOut(request_id, int(attempt), 0, 7)
        writer = next(w for w in self.writers.values() if push.grant.id in w.pushes)
        self.run(lambda: writer.worker.on_tokens([token]))

    @precondition(lambda self: self.pushes())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        writer, push = data.draw(st.sampled_from(self.pushes()))
        self.run(lambda: writer.end(push))

    @precondition(lambda self: self.clock.sleeps)
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.clock.sleeps) - 1))
        self.run(lambda: self.clock.sleeps[index].done() or self.clock.sleeps[index].set_result(None))

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.keys))
        self.run(lambda: self.decode._cancel(request.key))

    @precondition(lambda self: self.engine.computing)
    @rule(data=st.data())
    def finish_decoding(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.engine.computing)))
        self.run(lambda: self.finished(key))

    @rule(name=st.sampled_from(["p0", "p1"]))
    def cut(self, name: str) -> None:
        """Both sides report each other lost; what was on its way is gone. The writer lives on."""
        self.bag[(name, "d")] = deque()
        self.bag[("d", name)] = deque()
        self.run(lambda: (self.decode.on_lost(name), self.writers[name].worker.on_lost("d")))

    @rule(name=st.sampled_from(["p0", "p1"]))
    def kill(self, name: str) -> None:
        """It is reborn at once, knowing nothing."""

        async def reborn() -> None:
            dead = self.writers[name]
            dead.alive = False
            dead.died.set()
            self.writers[name] = Writer(name, self)
            self.bag[(name, "d")] = deque()
            self.bag[("d", name)] = deque()
            self.decode.on_lost(name)

        self.run(reborn)

    def finished(self, key: str) -> None:
        request_id, _, attempt = key.partition("#")
        self.engine.free |= set(self.engine.computing.pop(key))
        self.decode.on_tokens([TokenOut(request_id, int(attempt), 3, 7, finish=FinishReason.LENGTH)])

    def pushes(self) -> list[tuple[Writer, Push]]:
        return [(writer, push) for writer in self.writers.values() for push in writer.pushes.values()]

    # What must always hold ------------------------------------------------------------------------------------------

    @invariant()
    def no_block_is_writable_by_two(self) -> None:
        writable: dict[int, str] = {}
        for writer, push in self.pushes():
            if not writer.may_write(push.grant.id) or not (push.left and not push.stopped):
                continue
            assert push.grant.key in self.engine.reserved, (
                f"{push.grant.id} is writable after its blocks were given away"
            )
            for block in push.grant.block_ids:
                assert block not in writable, f"block {block}: {writable[block]} and {push.grant.id}"
                writable[block] = push.grant.id
        assert not self.engine.free & set(writable)

    @invariant()
    def the_books_agree(self) -> None:
        self.inbox.check_integrity()
        held = [
            b for blocks in (*self.engine.reserved.values(), *self.engine.computing.values()) for b in blocks
        ]
        assert len(held) == len(set(held))
        assert set(held) | self.engine.free == set(range(NUM_BLOCKS))

    def teardown(self) -> None:
        """Everybody is cancelled, the writers say their last words: then nothing may be left."""
        for request in self.keys:
            self.run(lambda key=request.key: self.decode._cancel(key))
        for _ in range(40):
            for writer, push in self.pushes():
                self.run(lambda writer=writer, push=push: (writer.write(push), writer.end(push)))
            for pair, queue in list(self.bag.items()):
                while queue:
                    message = queue.popleft()
                    self.run(lambda pair=pair, message=message: self.deliver_to(*pair, message))
            self.all_is_said_and_answered()
            for sleep in list(self.clock.sleeps):
                self.run(lambda sleep=sleep: sleep.done() or sleep.set_result(None))
            if not self.decode.num_jobs and not self.pushes():
                break
        left = self.decode.num_jobs, len(self.engine.reserved), self.inbox.num_live, len(self.engine.free)
        self.run(self.decode.close)
        assert left == (0, 0, 0, NUM_BLOCKS), left


class OverSharedMemory(Machine):
    checked = False


class OnAnotherHost(Machine):
    far = True


MACHINES = [
    pytest.param(Machine, id="checked writes"),
    pytest.param(OverSharedMemory, id="claims"),
    pytest.param(OnAnotherHost, id="on another host"),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_no_block_is_ever_writable_by_two_owners(machine: type[Machine]) -> None:
    depth = settings(
        max_examples=60, stateful_step_count=DEPTH, deadline=None, suppress_health_check=list(HealthCheck)
    )
    with asyncio.Runner() as runner:
        machine.loop = runner.get_loop()
        run_state_machine_as_test(machine, settings=depth)

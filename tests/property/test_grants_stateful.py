"""Model checking of grants and hand-off: the production workers and ledger under every order of messages, deaths and timeouts.

Hypothesis chooses what happens next; messages may be doubled, reordered and lost (losing one cuts the pair, as mail does). After
each event: no block is writable by two, and none that is free, or that decode computes in, is writable by anybody."""

import asyncio
from collections import deque
from collections.abc import Callable
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

from core.config.cluster_config import TransferConfig
from core.kv import RankPool
from core.messages import Cancel, ChunkDone, Message, PrefillAssigned, Submit
from core.types import FinishReason, Request, Route, SamplingParams, TokenOut
from decode.decode_worker import DecodeWorker
from kvtransfer.inbox import Inbox
from kvtransfer.memory import OwnMemory
from tests.property.grants_world import (
    NUM_BLOCKS,
    PROMPT,
    SHARD,
    Engine,
    ManualClock,
    Memory,
    Post,
    Push,
    Reporter,
    Writer,
)
from tests.property.late_memory import Act, LateMemory

DEPTH = 60


class Machine(RuleBasedStateMachine):
    checked = True
    remote = False
    """The pool lies in the memory of another host."""
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.run(self.build)

    async def build(self) -> None:
        self.bag: dict[tuple[str, str], deque[Message]] = {}
        self.clock, self.memory = ManualClock(), Memory(self, self.checked)
        self.writers = {name: Writer(name, self) for name in ("p0", "p1")}
        pool = RankPool(shard=SHARD, num_blocks=NUM_BLOCKS, memory=int(self.remote))
        self.late = LateMemory(OwnMemory([pool]))
        self.late.own.attach([self.memory])  # type: ignore[list-item]
        self.inbox = Inbox(
            SHARD,
            NUM_BLOCKS,
            "d",
            "d",
            on_complete=lambda commit: self.decode.on_complete(commit),
            on_corrupted=lambda grant_id: self.decode.on_corrupted(grant_id),
            pools=[pool],
            remote=[self.late] if self.remote else [],
        )
        if not self.remote:
            self.inbox.attach([self.memory])  # type: ignore[list-item]
        self.engine = Engine()
        self.decode = DecodeWorker(
            Post("d", self.bag),  # type: ignore[arg-type]
            self.clock,
            inbox=self.inbox,
            config=TransferConfig(),
            schedulers=Reporter(),  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
        )
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
        memory = self.late.own if self.remote else self.inbox
        return memory.may_write(grant_id, start, end)

    def arrived(self, grant_id: str) -> None:
        """One of a grant's writes is in the pool."""
        if self.remote:
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
        writer.mail.send(
            "d", ChunkDone(grant_id=push.grant.id, seq=0, first_token=0, num_tokens=1, num_bytes=1)
        )

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

    @rule(writer=st.sampled_from(["p0", "p1"]))
    def submit(self, writer: str) -> None:
        request = Request(
            id=f"r{self.count}", prompt=PROMPT, sampling=SamplingParams(max_tokens=4), reply_to="frontend"
        )
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
        token = TokenOut(request_id=request_id, attempt=int(attempt), index=0, token=7)
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

    def cancelled(self, request: Request) -> None:
        self.run(lambda: self.decode.on_message("f", Cancel(request.id, request.attempt)))

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.keys))
        self.cancelled(request)

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
        self.decode.on_tokens(
            [
                TokenOut(
                    request_id=request_id, attempt=int(attempt), index=3, token=7, finish=FinishReason.LENGTH
                )
            ]
        )

    def pushes(self) -> list[tuple[Writer, Push]]:
        return [(writer, push) for writer in self.writers.values() for push in writer.pushes.values()]

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
            self.cancelled(request)
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
    remote = True


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

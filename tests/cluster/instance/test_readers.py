"""What a decode instance keeps of its output, for whom, and for how long."""

from dataclasses import replace

import pytest

import decode.readers
from core.messages import Failed, Message, Tokens
from core.stream_messages import AttachReader, DetachReader, FindStream, StreamFound, UsageNoted
from core.types import FinishReason, Request, Resumption, SamplingParams, TokenOut
from decode.readers import Readers
from sim.virtual_loop import LoopClock, run_virtual

KEEP_S = 30.0


class Post:
    address = "decode"

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, to: str, message: Message) -> None:
        self.sent.append((to, message))

    def to(self, frontend: str) -> list[Message]:
        return [message for to, message in self.sent if to == frontend]

    def tokens(self, frontend: str) -> list[int]:
        return [token.index for one in self.to(frontend) if isinstance(one, Tokens) for token in one.tokens]


class World:
    def __init__(self) -> None:
        self.post, self.clock = Post(), LoopClock()
        self.ended: list[str] = []
        self.readers = Readers(self.post, self.clock, self._end)  # type: ignore[arg-type]

    def _end(self, key: str) -> None:
        self.ended.append(key)
        self.readers.close(key)

    def request(self, name: str = "r", owner: str = "me", keep_s: float = KEEP_S) -> Request:
        return Request(
            id=name,
            prompt=(1,),
            sampling=SamplingParams(),
            reply_to="one",
            resumption=Resumption(stream=f"stream {name}", owner=owner, keep_s=keep_s, digest=b"d"),
        )

    def begin(self, name: str = "r", owner: str = "me", keep_s: float = KEEP_S) -> Request:
        request = self.request(name, owner, keep_s)
        assert self.readers.open(request)
        return request

    def say(self, request: Request, *indices: int, ends: bool = False) -> None:
        for index in indices:
            finish = FinishReason.STOP if ends and index == indices[-1] else None
            token = TokenOut(
                request_id=request.id, attempt=request.attempt, index=index, token=index, finish=finish
            )
            self.readers.send([token])
        if ends:
            self.readers.close(request.key)

    def find(self, name: str = "r", owner: str = "me") -> StreamFound:
        self.readers.on_message("asks", FindStream(7, f"stream {name}", owner))
        found = self.post.to("asks")[-1]
        assert isinstance(found, StreamFound)
        assert found.nonce == 7
        return found

    def attach(self, frontend: str, name: str = "r", owner: str = "me") -> None:
        self.readers.on_message(frontend, AttachReader(name, 0, owner))


def test_whoever_attaches_gets_all_tokens_and_those_that_follow() -> None:
    async def run() -> None:
        world = World()
        request = world.begin()
        world.say(request, 0, 1)
        world.attach("two")
        world.say(request, 2, ends=True)
        assert world.post.tokens("one") == world.post.tokens("two") == [0, 1, 2]

    run_virtual(run())


def test_a_sequence_goes_on_while_any_frontend_reads_it_and_for_a_while_after_the_last_is_lost() -> None:
    async def run() -> None:
        world = World()
        request = world.begin()
        world.attach("two")
        assert world.readers.lose("one") == []
        world.say(request, 0)
        assert world.readers.lose("two") == []
        await world.clock.sleep(KEEP_S - 1)
        assert not world.ended
        world.say(request, 1)
        world.attach("three")
        await world.clock.sleep(KEEP_S + 1)
        assert not world.ended, "somebody reads it"
        assert world.post.tokens("three") == [0, 1]
        assert world.find().sequences[0].num_sent == 2
        world.readers.lose("three")
        await world.clock.sleep(KEEP_S + 1)
        assert world.ended == [request.key]
        assert not world.find().sequences

    run_virtual(run())


def test_what_cannot_be_resumed_ends_with_its_frontend() -> None:
    async def run() -> None:
        world = World()
        plain = replace(world.request(), resumption=None)
        world.readers.open(plain)
        assert world.readers.lose("one") == [plain.key]

    run_virtual(run())


def test_a_sequence_whose_last_reader_leaves_ends_and_its_tokens_stay() -> None:
    async def run() -> None:
        world = World()
        request = world.begin()
        world.say(request, 0, 1)
        world.attach("two")
        world.readers.on_message("one", DetachReader("r", 0))
        assert not world.ended
        world.readers.on_message("two", DetachReader("r", 0))
        assert world.ended == [request.key]
        (kept,) = world.find().sequences
        assert (kept.runs, kept.num_sent, [token.index for token in kept.tokens]) == (False, 2, [0, 1])
        await world.clock.sleep(KEEP_S + 1)
        assert not world.find().sequences

    run_virtual(run())


def test_it_answers_its_owner_alone() -> None:
    async def run() -> None:
        world = World()
        world.begin()
        assert world.find().digest == b"d"
        assert world.find(owner="another") == StreamFound(nonce=7)
        world.attach("thief", owner="another")
        assert [type(message) for message in world.post.to("thief")] == [Failed]

    run_virtual(run())


def test_an_attempt_that_comes_twice_has_two_readers() -> None:
    async def run() -> None:
        world = World()
        request = world.begin()
        world.say(request, 0)
        assert not world.readers.open(replace(request, reply_to="two"))
        world.say(request, 1)
        assert world.post.tokens("two") == [0, 1]

    run_virtual(run())


def test_the_next_attempt_has_the_tokens_of_those_before() -> None:
    async def run() -> None:
        world = World()
        past = tuple(TokenOut(request_id="r", attempt=0, index=i, token=i, logprob=-1.0) for i in range(3))
        first = world.request()
        assert first.resumption is not None
        second = replace(first.retry((0, 1, 2)), resumption=replace(first.resumption, past=past))
        world.readers.open(second)
        world.say(second, 3)
        world.readers.on_message("two", AttachReader("r", 1, "me"))
        assert world.post.tokens("two") == [0, 1, 2, 3]
        tokens = [token for one in world.post.to("two") if isinstance(one, Tokens) for token in one.tokens]
        assert {token.key for token in tokens} == {"r#1"}
        assert [token.logprob for token in tokens[:3]] == [-1.0] * 3

    run_virtual(run())


def test_what_one_owner_leaves_is_bounded_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.readers, "MAX_SEQUENCES", 3)

    async def run() -> None:
        world = World()
        world.say(world.begin("other", owner="other"), 0, ends=True)
        for number in range(5):
            world.say(world.begin(f"r{number}"), 0, ends=number % 2 == 0)
        world.readers.lose("one")
        kept = [number for number in range(5) if world.find(f"r{number}").sequences]
        assert len(kept) == 3
        assert world.find("other", "other").sequences
        monkeypatch.setattr(decode.readers, "MAX_BYTES", 1500)
        big = world.begin("big")
        world.say(big, *range(7), ends=True)
        assert [name for name in ("r1", "r3", "r4", "big") if world.find(name).sequences] == ["big"]

    run_virtual(run())


@pytest.mark.parametrize("ending", ["left", "ended"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_frontend_that_was_lost_has_noted_what_it_said_it_had(ending: str, is_lost: bool) -> None:
    async def run() -> None:
        world = World()
        request = world.begin()

        def num_noted() -> int:
            return world.find().sequences[0].num_noted

        world.say(request, 0, 1, 2, ends=ending == "ended")
        if ending == "left":
            world.readers.on_message("one", DetachReader(request.id, request.attempt))
        assert num_noted() == 3
        if is_lost:
            world.readers.lose("one")
            assert num_noted() == 0
        world.readers.on_message("one", UsageNoted(request.id, request.attempt, 2))
        world.readers.lose("one")
        assert num_noted() == 2

    run_virtual(run())


def test_what_a_lost_frontend_read_is_noted_by_another_that_reads_it_too() -> None:
    async def run() -> None:
        world = World()
        request = world.begin()
        world.say(request, 0)
        world.attach("two")
        world.say(request, 1, ends=True)
        world.readers.lose("one")
        assert world.find().sequences[0].num_noted == 2
        world.readers.lose("two")
        assert world.find().sequences[0].num_noted == 0

    run_virtual(run())

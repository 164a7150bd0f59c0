"""The frontend against scripted schedulers and workers on a loopback network."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.ingress.delivery.frontend import Frontend
from core.clock import WallClock
from core.config.cluster_config import ScheduleConfig
from core.errors import Overloaded, ReplicaLost, RequestError, TargetOutOfReach
from core.messages import (
    AskStatus,
    CacheDropped,
    Cancel,
    DropCache,
    Failed,
    Finished,
    HintSession,
    Message,
    PlaceReply,
    PlaceRequest,
    Rejected,
    SessionHinted,
    Submit,
    Tokens,
)
from core.ports import Clock
from core.reports import DroppedBlocks, InstanceStatus, Status
from core.types import FinishReason, Request, Route, SamplingParams, TokenOut
from net.loopback_mail import LoopbackMail, LoopbackNetwork
from sim.virtual_loop import LoopClock, run_virtual
from tests.patience import until

TIMEOUT_S = 5.5


class Peer:
    """A scripted process: `act(sender, message)` decides what it sends."""

    def __init__(
        self, network: LoopbackNetwork, name: str, act: Callable[["Peer", str, Message], None]
    ) -> None:
        self.mail: LoopbackMail = network.join(name)
        self.got: list[Message] = []
        self.act = act
        self.mail.listen(self._on_message, lambda _: None)

    def _on_message(self, sender: str, message: Message) -> None:
        self.got.append(message)
        self.act(self, sender, message)

    def tokens(self, to: str, request: Request, indices: list[int]) -> None:
        last = request.sampling.max_tokens - 1
        out = tuple(
            TokenOut(
                request_id=request.id,
                attempt=request.attempt,
                index=i,
                token=100 + i,
                finish=FinishReason.LENGTH if i == last else None,
            )
            for i in indices
        )
        self.mail.send(to, Tokens(out))


class CutMail:
    """Loopback mail that `loses` a peer who lives on, as after a cut."""

    def __init__(self, inner: LoopbackMail) -> None:
        self._inner = inner
        self.address, self.send, self.close = inner.address, inner.send, inner.close
        self.loses: Callable[[str], None] = lambda _: None

    def listen(self, on_message: Callable[[str, Message], None], on_lost: Callable[[str], None]) -> None:
        self.loses = on_lost
        self._inner.listen(on_message, on_lost)


def instance(address: str) -> InstanceStatus:
    return InstanceStatus(
        address=address,
        prefills=False,
        decodes=True,
        num_blocks=9,
        free_blocks=9,
        num_waiting=0,
        num_running=0,
        defect="",
    )


class World:
    def __init__(self, clock: Clock | None = None) -> None:
        self.network = LoopbackNetwork()
        self.mail = CutMail(self.network.join("frontend"))
        self.decodes: list[Peer] = []
        self.giving_way: set[str] = set()
        """Requests that are served by a class of less priority."""
        self.scheduler = Peer(self.network, "scheduler", self._schedule)
        self.frontend = Frontend(
            self.mail,
            clock or WallClock(),
            ScheduleConfig(),
            4,
            resolve_schedulers=self._resolve,
            request_timeout_s=TIMEOUT_S,
        )
        self.runner = asyncio.create_task(self.frontend.run())

    async def _resolve(self) -> list[str]:
        return [self.scheduler.mail.address]

    def _schedule(self, peer: Peer, sender: str, message: Message) -> None:
        match message:
            case PlaceRequest(request_id=request_id, attempt=attempt):
                alive = [d for d in self.decodes if d.mail.address not in message.exclude]
                slo = (
                    message.slo.giving_way() if request_id in self.giving_way and not attempt else message.slo
                )
                peer.mail.send(sender, PlaceReply(request_id, attempt, Route(alive[0].mail.address), slo))
            case AskStatus(nonce):
                known = tuple(instance(decode.mail.address) for decode in self.decodes)
                peer.mail.send(sender, Status(nonce=nonce, why_not="", num_queued=0, instances=known))
            case _:
                pass

    def decode(self, act: Callable[[Peer, str, Message], None]) -> Peer:
        self.decodes.append(Peer(self.network, f"decode{len(self.decodes)}", act))
        return self.decodes[-1]

    def request(self, max_tokens: int = 6) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens)
        return Request(
            id=self.frontend.new_request_id(),
            prompt=(1, 2, 3, 4, 5),
            sampling=sampling,
            reply_to=self.frontend.address,
        )

    async def run(self, request: Request) -> list[int]:
        return [token.token async for token in self.frontend.generate(request)]


@pytest.fixture
async def world():
    world = World()
    await asyncio.sleep(0.01)
    yield world
    world.runner.cancel()
    await world.frontend.close()


async def test_reordered_and_doubled_tokens_come_out_once_in_order(world: World) -> None:
    def act(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            for indices in ([2, 1], [1], [0, 0, 1, 2], [5, 4], [3, 4]):
                peer.tokens(sender, message.request, indices)

    world.decode(act)
    assert await world.run(world.request()) == [100, 101, 102, 103, 104, 105]
    await until(lambda: len(world.scheduler.got) == 2)
    assert [type(m) for m in world.scheduler.got] == [PlaceRequest, Finished]
    assert not any(isinstance(m, Cancel) for m in world.decodes[0].got)


async def test_a_decode_that_dies_mid_stream_loses_nothing(world: World) -> None:
    def die(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            peer.tokens(sender, message.request, [0, 1, 2, 4])
            asyncio.get_running_loop().call_later(0.02, lambda: asyncio.ensure_future(peer.mail.close()))

    def go_on(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            assert message.request.attempt == 1
            assert message.request.emitted == (100, 101, 102)
            peer.tokens(sender, message.request, [3, 4, 5])

    world.decode(die)
    world.decode(go_on)
    assert await world.run(world.request()) == [100, 101, 102, 103, 104, 105]
    places = [m for m in world.scheduler.got if isinstance(m, PlaceRequest)]
    assert [p.num_tokens for p in places] == [5, 8]
    assert places[1].exclude == (world.decodes[0].mail.address,)


async def test_every_instance_serves_a_request_by_the_class_that_the_scheduler_decided_on(
    world: World,
) -> None:
    def die(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            peer.tokens(sender, message.request, [0, 1])
            asyncio.get_running_loop().call_later(0.02, lambda: asyncio.ensure_future(peer.mail.close()))

    def go_on(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            peer.tokens(sender, message.request, [2, 3, 4, 5])

    world.decode(die)
    world.decode(go_on)
    request = world.request()
    world.giving_way.add(request.id)
    await world.run(request)
    submitted = [m.request.slo for d in world.decodes for m in d.got if isinstance(m, Submit)]
    assert submitted == [request.slo.giving_way()] * 2
    places = [m.slo for m in world.scheduler.got if isinstance(m, PlaceRequest)]
    assert places == [request.slo, request.slo.giving_way()]


async def test_a_client_that_lags_gets_each_token_once_through_a_loss(world: World) -> None:
    def die(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            peer.tokens(sender, message.request, [0])

    def go_on(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            assert message.request.emitted == (100, 101, 102)
            peer.tokens(sender, message.request, [3, 4, 5])

    first, request = world.decode(die), world.request()
    world.decode(go_on)
    stream = world.frontend.generate(request)
    got = [(await anext(stream)).token]
    first.tokens(world.frontend.address, request, [1, 2])
    await asyncio.sleep(0)
    await first.mail.close()
    await asyncio.sleep(0)  # the frontend has heard of tokens and loss before anybody asks for the next token
    got += [token.token async for token in stream]
    assert got == [100, 101, 102, 103, 104, 105]


async def test_closing_the_stream_cancels_at_the_worker_and_frees_the_place(world: World) -> None:
    def act(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            peer.tokens(sender, message.request, [0, 1])

    decode = world.decode(act)
    stream = world.frontend.generate(world.request())
    assert (await anext(stream)).index == 0
    await stream.aclose()
    assert world.frontend.num_running == 0
    await until(lambda: isinstance(decode.got[-1], Cancel))
    await until(lambda: isinstance(world.scheduler.got[-1], Finished))


async def test_refusals_reach_the_client_as_what_they_are(world: World) -> None:
    answers = [
        Rejected("", 0, "queue full", 3.0),
        Rejected("", 0, "too long for any instance", 0.0),
        Rejected("", 0, "about 3.1 s on an idle instance", 0.0, 3.06),
    ]

    def reject(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, PlaceRequest):
            peer.mail.send(sender, replace(answers.pop(0), request_id=message.request_id))

    world.scheduler.act = reject
    with pytest.raises(Overloaded) as overloaded:
        await world.run(world.request())
    assert overloaded.value.retry_after_s == 3.0
    with pytest.raises(RequestError, match="too long"):
        await world.run(world.request())
    with pytest.raises(TargetOutOfReach, match="idle instance") as hopeless:
        await world.run(world.request())
    assert hopeless.value.possible_ttft_s == 3.06


def fail(peer: Peer, sender: str, message: Message) -> None:
    if isinstance(message, Submit):
        peer.mail.send(sender, Failed(message.request.id, message.request.attempt, "engine stopped", True))


Act = Callable[[Peer, str, Message], None]


async def attempts_at(*acts: Act) -> list[float]:
    """Have a request answered by instances that do this, one behind the other. Returns when each was asked, in virtual time."""
    clock, submitted_at = LoopClock(), list[float]()

    def noting(act: Act) -> Act:
        def noted(peer: Peer, sender: str, message: Message) -> None:
            if isinstance(message, Submit):
                submitted_at.append(round(clock.now() - began_at, 3))
            act(peer, sender, message)

        return noted

    world = World(clock)
    await clock.sleep(1)
    began_at = clock.now()
    for act in acts:
        world.decode(noting(act))
    try:
        assert await world.run(world.request()) == [100, 101, 102, 103, 104, 105]
        return submitted_at
    finally:
        assert world.frontend.num_running == 0
        assert clock.now() - began_at <= TIMEOUT_S
        world.runner.cancel()
        await world.frontend.close()


def answer(peer: Peer, sender: str, message: Message) -> None:
    if isinstance(message, Submit):
        peer.tokens(sender, message.request, [0, 1, 2, 3, 4, 5])


def test_the_first_lost_instance_is_left_at_once_and_the_others_with_growing_pauses() -> None:
    assert run_virtual(attempts_at(fail, answer)) == [0, 0]
    assert run_virtual(attempts_at(fail, fail, fail, fail, answer)) == [0, 0, 0.25, 1.25, 5.25]


def test_what_five_instances_in_a_row_have_not_answered_is_given_up() -> None:
    with pytest.raises(ReplicaLost, match="5 instances in a row .* giving up"):
        run_virtual(attempts_at(fail, fail, fail, fail, fail, answer))


def test_a_token_is_fruit_and_the_next_loss_is_the_first_again() -> None:
    def one_token(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            peer.tokens(sender, message.request, [0])
            asyncio.get_running_loop().call_later(0.01, fail, peer, sender, message)

    def rest(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            peer.tokens(sender, message.request, [1, 2, 3, 4, 5])

    assert run_virtual(attempts_at(fail, fail, one_token, rest)) == [0, 0, 0.25, 0.26]


async def test_a_scheduler_that_was_lost_and_found_again_is_asked_again(world: World) -> None:
    asked: list[Message] = []

    def act(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            peer.tokens(sender, message.request, [0, 1, 2, 3, 4, 5])

    def forget_the_first(peer: Peer, sender: str, message: Message) -> None:
        asked.extend([message] if isinstance(message, PlaceRequest) else [])
        if len(asked) != 1:
            plain(peer, sender, message)

    world.decode(act)
    plain, world.scheduler.act = world.scheduler.act, forget_the_first
    answer = asyncio.create_task(world.run(world.request()))
    await until(lambda: bool(asked))
    world.mail.loses(world.scheduler.mail.address)
    assert await answer == [100, 101, 102, 103, 104, 105]
    assert len(asked) == 2


async def test_every_instance_drops_its_cache(world: World) -> None:
    def act(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, DropCache):
            count = len(peer.mail.address)
            peer.mail.send(sender, CacheDropped(message.nonce, DroppedBlocks(device=count, in_use=1)))

    peers = [world.decode(act) for _ in range(3)]
    dropped = await world.frontend.drop_caches()
    names = [peer.mail.address for peer in peers]
    assert dropped == {name: DroppedBlocks(device=len(name), in_use=1) for name in names}
    silent = world.decode(lambda *_: None)
    with pytest.raises(ReplicaLost, match=f"instance {silent.mail.address} did not answer"):
        await world.frontend.drop_caches()


async def test_every_instance_hears_of_a_session(world: World) -> None:
    heard: list[HintSession] = []

    def act(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, HintSession):
            heard.append(message)
            peer.mail.send(sender, SessionHinted(message.nonce, peer is peers[1]))

    peers = [world.decode(act) for _ in range(3)]
    known = await world.frontend.hint_session("acme", "s", release=True)
    assert known == [peers[1].mail.address]
    assert [(one.tenant, one.session, one.release) for one in heard] == [("acme", "s", True)] * 3


async def test_a_retiring_frontend_is_not_ready_and_answers_all_the_same(world: World) -> None:
    def act(peer: Peer, sender: str, message: Message) -> None:
        if isinstance(message, Submit):
            peer.tokens(sender, message.request, [0, 1, 2, 3, 4, 5])

    world.decode(act)
    assert await world.frontend.ready() == (True, "")
    world.frontend.retire()
    assert (await world.frontend.ready())[0] is False
    assert len(await world.run(world.request())) == 6

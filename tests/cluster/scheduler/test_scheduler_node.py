"""The scheduler's shell on a loopback network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from cluster.scheduler.fleet.roster import NO_DECODE
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.kept_adapters import KeptAdapters
from cluster.scheduler.scheduler_node import SchedulerNode
from core.adapter_messages import EMPTY_LIST, AdapterChanged, AdapterList, AdaptersHeld, LoadAdapter
from core.clock import WallClock
from core.config.cluster_config import ScheduleConfig
from core.messages import AskStatus, Cancel, Finished, Message, PlaceReply, Rejected
from core.reports import Status
from net.loopback_mail import LoopbackNetwork
from tests.cluster.scheduler.routing_world import ask, instance, report
from tests.patience import PATIENCE_S


class Peer:
    def __init__(self, net: "Net", name: str) -> None:
        self.mail = net.network.join(name)
        self._scheduler = net.node.address
        self.got: asyncio.Queue[Message] = asyncio.Queue()
        self.mail.listen(lambda _, message: self.got.put_nowait(message), lambda _: None)

    def tell(self, message: Message) -> None:
        self.mail.send(self._scheduler, message)

    async def hears(self) -> Message:
        async with asyncio.timeout(PATIENCE_S):
            return await self.got.get()

    async def status(self, nonce: int = 0) -> Status:
        self.tell(AskStatus(nonce))
        status = await self.hears()
        assert isinstance(status, Status)
        return status


class Net:
    def __init__(self, config: ScheduleConfig, kept: KeptAdapters | None = None) -> None:
        self.network = LoopbackNetwork()
        mail, scheduler = self.network.join("scheduler"), GlobalScheduler(config)
        self.node = SchedulerNode(mail, WallClock(), scheduler, kept_adapters=kept)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Net"]:
        task = asyncio.create_task(self.node.run())
        await asyncio.sleep(0)
        yield self
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await self.node.close()


async def test_it_places_answers_for_its_status_and_notices_the_lost() -> None:
    async with Net(ScheduleConfig()).running() as net:
        frontend, decode = Peer(net, "f"), Peer(net, "d")
        assert (await frontend.status()).why_not == NO_DECODE
        decode.tell(instance(decode.mail.address))
        frontend.tell(ask("a").place)
        placed = await frontend.hears()
        assert isinstance(placed, PlaceReply)
        assert placed.route.decode == decode.mail.address
        status = await frontend.status(7)
        assert (status.nonce, status.why_not, len(status.instances)) == (7, "", 1)
        await decode.mail.close()
        async with asyncio.timeout(PATIENCE_S):
            while (await frontend.status()).why_not != NO_DECODE:
                await asyncio.sleep(0)


async def test_time_passes_while_requests_wait() -> None:
    async with Net(ScheduleConfig(max_queue_wait_s=0.05)).running() as net:
        frontend, decode = Peer(net, "f"), Peer(net, "d")
        decode.tell(instance(decode.mail.address, max_num_seqs=1))
        frontend.tell(ask("a").place)
        assert isinstance(await frontend.hears(), PlaceReply)
        frontend.tell(ask("b").place)
        rejected = await frontend.hears()
        assert isinstance(rejected, Rejected)
        assert rejected.retry_after_s >= 1


async def test_a_finished_request_makes_room_for_the_next() -> None:
    async with Net(ScheduleConfig()).running() as net:
        frontend, decode = Peer(net, "f"), Peer(net, "d")
        decode.tell(instance(decode.mail.address, max_num_seqs=1))
        for name in ("a", "b"):
            frontend.tell(ask(name).place)
        assert isinstance(await frontend.hears(), PlaceReply)
        frontend.tell(Finished("a", 0))
        placed = await frontend.hears()
        assert isinstance(placed, PlaceReply)
        assert placed.request_id == "b"


async def test_defects_and_strange_messages_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with Net(ScheduleConfig()).running() as net:
        decode = Peer(net, "d")
        decode.tell(instance(decode.mail.address))
        for _ in range(3):
            decode.tell(report(decode.mail.address, defect="two owners of block 7"))
        decode.tell(Cancel("x", 0))
        decode.tell(AskStatus(1))
        status = await decode.hears()
        assert isinstance(status, Status)
        assert status.instances[0].defect == "two owners of block 7"
    assert caplog.text.count("two owners of block 7") == 1
    assert "Cancel is not for the scheduler" in caplog.text


async def test_an_instance_is_there_for_requests_once_it_has_the_adapters_that_are_loaded() -> None:
    async with Net(ScheduleConfig()).running() as net:
        frontend, first, second = Peer(net, "f"), Peer(net, "a"), Peer(net, "b")
        first.tell(AdaptersHeld(EMPTY_LIST.version))
        first.tell(instance(first.mail.address))
        frontend.tell(LoadAdapter(1, "sql@1", "/adapters/sql", False))
        listed = await latest(first, "loading")
        first.tell(AdaptersHeld(listed.version))
        assert await frontend.hears() == AdapterChanged(1)
        second.tell(AdaptersHeld(EMPTY_LIST.version))
        second.tell(instance(second.mail.address))
        second.tell(report(second.mail.address, free_blocks=7))
        listed = await latest(second, "serving")
        assert [one.address for one in (await frontend.status()).instances] == [first.mail.address]
        second.tell(AdaptersHeld(listed.version))
        async with asyncio.timeout(PATIENCE_S):
            while len((status := await frontend.status()).instances) < 2:
                await asyncio.sleep(0)
        assert status.instances[1].free_blocks == 7, "what it said before counts"


async def latest(peer: Peer, state: str) -> AdapterList:
    """Return the list in which the adapter is in that state, when it comes."""
    while True:
        message = await peer.hears()
        if isinstance(message, AdapterList) and [each.state for each in message.adapters] == [state]:
            return message

"""Mail over real sockets that lose, double, reorder, delay and break; and peers that stop, die or come back."""

import asyncio
import random
from collections.abc import Callable

import pytest

from core.config.cluster_config import MailConfig
from core.errors import ReplicaLost
from core.messages import Cancel, Replica, Replicas
from net.channel import Channel
from net.mail import TcpMail
from net.tls import SecretTls
from tests.contract.test_mail import Box
from tests.far_host import FAR
from tests.net.faulty import Fate, FaultyChannel
from tests.patience import PATIENCE_S

QUICK = MailConfig(heartbeat_s=0.03, peer_timeout_s=1.0, reconnect_s=PATIENCE_S)


@pytest.fixture(params=[None, SecretTls(b"key")], ids=["plain", "tls"])
async def join(request: pytest.FixtureRequest):
    boxes: list[Box] = []

    def make(
        fate: Callable[[bytes], Fate] = lambda _: "pass", config: MailConfig = QUICK, port: int = 0
    ) -> Box:
        mail = TcpMail(
            b"key",
            FAR if request.param else "127.0.0.1",
            port=port,
            config=config,
            wrap=lambda channel: FaultyChannel(channel, fate),  # type: ignore[arg-type,return-value]
            tls=request.param,
        )
        boxes.append(Box(mail))
        return boxes[-1]

    yield make
    for box in boxes:
        await box.mail.close()


@pytest.mark.parametrize("seed", range(3))
async def test_all_arrives_in_order_over_bad_connections(join, seed: int) -> None:
    rng = random.Random(seed)
    kinds: list[Fate] = ["drop", "double", "swap", "delay", "cut"]

    def fate(_: bytes) -> Fate:
        return rng.choice(kinds) if rng.random() < 0.1 else "pass"

    a, b = join(fate), join(fate)
    for i in range(60):
        a.mail.send(b.mail.address, Cancel("from a", i))
        b.mail.send(a.mail.address, Cancel("from b", i))
        await asyncio.sleep(0.002)
    await a.until(lambda box: len(box.got) >= 60)
    await b.until(lambda box: len(box.got) >= 60)
    assert [m.attempt for _, m in a.got] == [m.attempt for _, m in b.got] == list(range(60))
    assert a.lost == b.lost == []


@pytest.mark.parametrize("kind", ["drop", "double", "swap", "delay", "cut"])
async def test_one_bad_frame_costs_nothing_also_when_it_is_the_last(join, kind: Fate) -> None:
    fates: list[Fate] = [kind]
    a, b = join(lambda frame: fates.pop() if fates and frame[0] == 1 else "pass"), join()
    a.mail.send(b.mail.address, Cancel("only", 1))
    await b.until(lambda box: bool(box.got))
    await asyncio.sleep(0.1)
    assert [m.attempt for _, m in b.got] == [1]
    assert not a.lost
    assert not b.lost


async def test_a_connection_that_is_made_when_all_ends_is_closed(join) -> None:
    """Tasks that are cancelled before they begin, as a loop's end does it, run no `finally`."""
    made: list[Channel] = []
    tasks: list[asyncio.Task[None]] = []

    def end() -> None:
        tasks.extend(task for task in asyncio.all_tasks() if task is not me)
        for task in tasks:
            task.cancel()

    def wrap(channel: Channel) -> Channel:
        made.append(channel)
        asyncio.get_running_loop().call_soon(end)  # before the task that is begun next
        return channel

    me, b = asyncio.current_task(), join()
    a = TcpMail(b"key", config=QUICK, wrap=wrap, tls=SecretTls(b"key"))
    a.listen(lambda *_: None, lambda _: None)
    a.send(b.mail.address, Cancel("only", 1))
    async with asyncio.timeout(PATIENCE_S):
        while not tasks:
            await asyncio.sleep(0.002)
    await asyncio.gather(*tasks, return_exceptions=True)
    (channel,) = made
    with pytest.raises(ReplicaLost):
        await channel.send("anything")
    await a.close()


async def test_a_silent_peer_is_lost_and_both_sides_learn_it(join) -> None:
    silent = [False]
    a, b = join(), join(lambda _: "drop" if silent[0] else "pass")
    a.mail.send(b.mail.address, Cancel("hello", 0))
    await b.until(lambda box: bool(box.got))
    silent[0] = True
    await a.until(lambda box: bool(box.lost))
    silent[0] = False
    await b.until(lambda box: bool(box.lost))
    b.mail.send(a.mail.address, Cancel("again", 1))
    await a.until(lambda box: bool(box.got))
    a.mail.send(b.mail.address, Cancel("welcome back", 2))
    await b.until(lambda box: len(box.got) == 2)
    await asyncio.sleep(0.1)
    assert a.lost == [b.mail.address]
    assert b.lost == [a.mail.address]


async def test_a_peer_reborn_on_the_same_address_is_another_one(join) -> None:
    a, b = join(), join()
    address = b.mail.address
    a.mail.send(address, Cancel("hello", 0))
    await b.until(lambda box: bool(box.got))
    await b.mail.close()
    reborn = join(port=int(address.rpartition(":")[2]))
    assert reborn.mail.address == address
    await a.until(lambda box: bool(box.lost))
    a.mail.send(address, Cancel("who are you", 1))
    await reborn.until(lambda box: bool(box.got))
    assert [m.attempt for _, m in reborn.got] == [1]
    assert a.lost == [address]


async def test_a_peer_that_only_listens_acknowledges_long_messages_before_its_next_beat(join) -> None:
    """Requests with images are as long as this. Unacknowledged, they would count as a peer that does not read."""
    a, b = join(config=MailConfig(heartbeat_s=PATIENCE_S)), join(config=MailConfig(heartbeat_s=PATIENCE_S))
    long = Replicas((Replica(b"x", bytes(12 << 20)),))
    for number in range(1, 25):
        a.mail.send(b.mail.address, long)
        await b.until(lambda box, number=number: len(box.got) >= number)
    assert a.lost == b.lost == []

"""One suite over every Mail."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from core.messages import Cancel, Message
from core.ports import Mail
from net.loopback_mail import LoopbackNetwork
from net.mail import TcpMail
from net.tls import SecretTls
from tests.far_host import FAR
from tests.patience import PATIENCE_S


@dataclass
class Box:
    """A peer that keeps what it gets."""

    mail: Mail
    got: list[tuple[str, Message]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mail.listen(lambda sender, message: self.got.append((sender, message)), self.lost.append)

    async def until(self, done: Callable[["Box"], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not done(self):
                await asyncio.sleep(0.002)


Join = Callable[[str], Box]


@pytest.fixture(params=["tcp", "tls", "loopback"])
async def join(request: pytest.FixtureRequest):
    boxes: list[Box] = []
    network = LoopbackNetwork()
    made: dict[str, Callable[[str], Mail]] = {
        "tcp": lambda _: TcpMail(b"key"),
        "tls": lambda _: TcpMail(b"key", FAR, tls=SecretTls(b"key")),
        "loopback": network.join,
    }

    def make(name: str) -> Box:
        boxes.append(Box(made[request.param](name)))
        return boxes[-1]

    yield make
    for box in boxes:
        await box.mail.close()


async def test_messages_arrive_in_order_with_the_senders_name(join: Join) -> None:
    a, b = join("a"), join("b")
    sent = [Cancel("r", i) for i in range(500)]
    for message in sent:
        a.mail.send(b.mail.address, message)
    await b.until(lambda box: len(box.got) == 500)
    assert b.got == [(a.mail.address, message) for message in sent]
    assert not a.lost
    assert not b.lost


async def test_an_answer_comes_back_and_both_may_start_at_once(join: Join) -> None:
    a, b = join("a"), join("b")
    for i in range(50):
        a.mail.send(b.mail.address, Cancel("from a", i))
        b.mail.send(a.mail.address, Cancel("from b", i))
    await a.until(lambda box: len(box.got) == 50)
    await b.until(lambda box: len(box.got) == 50)
    assert [m.attempt for _, m in a.got] == list(range(50))
    assert [m.attempt for _, m in b.got] == list(range(50))


async def test_a_peer_that_dies_is_reported_once_after_its_last_message(join: Join) -> None:
    a, b = join("a"), join("b")
    a.mail.send(b.mail.address, Cancel("hello", 0))
    await b.until(lambda box: bool(box.got))
    b.mail.send(a.mail.address, Cancel("last words", 0))
    await a.until(lambda box: bool(box.got))
    await b.mail.close()
    await a.until(lambda box: bool(box.lost))
    await asyncio.sleep(0.02)
    assert a.lost == [b.mail.address]


async def test_an_unreachable_peer_is_reported_lost(join: Join) -> None:
    a, b = join("a"), join("b")
    address = b.mail.address
    await b.mail.close()
    a.mail.send(address, Cancel("anyone?", 0))
    await a.until(lambda box: bool(box.lost))
    assert a.lost == [address]


async def test_a_closed_peer_sends_nothing(join: Join) -> None:
    a, b = join("a"), join("b")
    await a.mail.close()
    a.mail.send(b.mail.address, Cancel("ghost", 0))
    await asyncio.sleep(0.02)
    assert not b.got

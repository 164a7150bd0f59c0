"""A link's latency and rate are learned from writes, whatever their sizes, and a slow link shows while it is being slow."""

import contextlib
import socket
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import TransferError
from kvtransfer.link_rate import LinkRate
from kvtransfer.link_speeds import LinkSpeeds
from kvtransfer.transport.base import Carried
from kvtransfer.transport.streams import Stream
from tests.patience import PATIENCE_S


@settings(max_examples=50)
@given(
    st.lists(st.integers(1_000, 50_000_000), min_size=4, max_size=20),
    st.floats(1e6, 1e11),
    st.floats(0.0, 0.01),
)
def test_what_is_learned_explains_the_writes_that_were_seen(
    sizes: list[int], bytes_per_s: float, latency_s: float
) -> None:
    rate = LinkRate()
    for size in sizes:
        rate.note(size, latency_s + size / bytes_per_s)
    learned_s, s_per_byte = rate.estimate(0.0)
    expected_s = sum(latency_s + size / bytes_per_s for size in sizes)
    assert learned_s >= 0
    assert sum(learned_s + size * s_per_byte for size in sizes) == pytest.approx(expected_s, rel=0.5)


def test_tiny_writes_teach_the_latency_and_leave_the_rate_alone() -> None:
    rate = LinkRate()
    for size in (1000, 8_000_000, 2000, 4_000_000, 500, 800):
        rate.note(size, 0.002 + size / 1e9)
    latency_s, s_per_byte = rate.estimate(0.0)
    assert latency_s == pytest.approx(0.002, rel=0.01)
    assert s_per_byte == pytest.approx(1e-9, rel=0.01)


def test_one_pause_is_no_slow_link_and_several_are() -> None:
    rate = LinkRate()
    for _ in range(20):
        rate.note(1_000_000, 0.001)
    rate.note(1_000_000, 5.0)
    assert rate.estimate(0.0)[1] < 2e-9
    for _ in range(20):
        rate.note(1_000_000, 0.1)
    assert rate.estimate(0.0)[1] == pytest.approx(1e-7, rel=0.2)


def test_writes_that_overlap_share_the_link() -> None:
    rate = LinkRate(last_at=0.0)
    one, two = rate.begin(1000, 0.0), rate.begin(1000, 0.0)
    rate.end(one, 1.0)
    rate.end(two, 2.0)
    assert rate.estimate(2.0)[1] == pytest.approx(1e-3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_write_that_does_not_end_shows_how_slow_its_link_is() -> None:
    clock = Clock()
    speeds = LinkSpeeds(clock)
    with speeds.writing("d", "tcp", 1000):
        clock.now = 10.0
        (link,) = speeds.known()
        assert link.bytes_per_s == pytest.approx(100)
    with speeds.writing("d", "tcp", 1000):
        clock.now = 11.0
    assert speeds.s_per_byte("d", "tcp") < 0.01


def test_a_failed_write_teaches_nothing_and_what_is_old_is_forgotten() -> None:
    clock = Clock()
    speeds = LinkSpeeds(clock)
    with contextlib.suppress(TransferError), speeds.writing("d", "tcp", 1000):
        raise TransferError("cut")
    assert speeds.known() == ()
    with speeds.writing("d", "tcp", 1000):
        clock.now = 6.0
    assert [(link.receiver, link.transport) for link in speeds.known()] == [("d", "tcp")]
    clock.now = 400.0
    assert speeds.known() == ()


def test_what_the_system_says_has_arrived_counts_and_not_when_a_write_ends() -> None:
    clock, told = Clock(), [Carried(0, 0.0), Carried(500, 2.0), Carried(500, 3.0)]
    speeds = LinkSpeeds(clock)
    with speeds.writing("d", "tcp", 1000, lambda: told.pop(0) if told else Carried(0, 0.0)):
        clock.now = 0.001
    assert [link.bytes_per_s for link in speeds.known()] == [pytest.approx(250)]
    assert [link.bytes_per_s for link in speeds.known()] == [pytest.approx(200, rel=0.05)]
    assert [link.bytes_per_s for link in speeds.known()] == [pytest.approx(200, rel=0.05)], "nothing is new"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says it")
def test_a_tcp_stream_knows_what_has_arrived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Stream(socket.create_connection(listener.getsockname()), "them", dialled=True)
        theirs = Stream(listener.accept()[0], "us", dialled=False)
    try:
        ours.send([memoryview(bytes(100_000))])
        theirs.receive([memoryview(bytearray(100_000))])
        theirs.send([memoryview(b"+")])
        ours.receive([memoryview(bytearray(1))])
        progress = ours.progress()
        assert progress is not None
        assert 100_000 <= progress[0] <= 100_001, "the start of the connection may count as a byte"
        assert 0 <= progress[1] < PATIENCE_S
    finally:
        ours.close()
        theirs.close()

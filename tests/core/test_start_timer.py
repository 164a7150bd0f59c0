"""The phases of a start add up to the whole, whatever runs within or beside them."""

import logging

import pytest

from core.reports import StartTimes, of_all_ranks
from core.start_timer import StartTimer


class Hand:
    """A clock that is put forward by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_each_moment_belongs_to_the_phase_that_runs() -> None:
    clock = Hand()
    timer = StartTimer("imports", clock, since=98.0)
    clock.wait(1)
    timer.begin("reading")
    clock.wait(4)
    with timer.within("packing"):
        clock.wait(8)
    clock.wait(16)
    timer.begin("imports")
    clock.wait(32)
    start = timer.times()
    assert start.phases == (("imports", 35.0), ("reading", 20.0), ("packing", 8.0))
    assert start.whole_s == clock.now - 98.0


def test_a_call_is_timed_within_each_phase_that_it_interrupts_also_when_it_fails() -> None:
    clock = Hand()
    timer = StartTimer("reading", clock)

    def pack(seconds: float) -> float:
        clock.wait(seconds)
        return 1 / (seconds - 2)

    timed = timer.timed("packing", pack)
    assert timed(3.0) == 1.0
    with pytest.raises(ZeroDivisionError):
        timed(2.0)
    clock.wait(1)
    assert timer.times().phases == (("reading", 1.0), ("packing", 5.0))


def test_what_other_processes_have_timed_is_taken_from_the_time_that_was_spent_waiting_for_them() -> None:
    clock = Hand()
    timer = StartTimer("sizes", clock)
    clock.wait(1)
    timer.begin("ranks")
    clock.wait(10)
    quick = StartTimes(phases=(("meeting", 3.0), ("reading", 1.0)), bytes_read=30)
    slow = StartTimes(phases=(("meeting", 1.0), ("reading", 6.0)), bytes_read=20)
    timer.take_over(of_all_ranks([quick, slow]))
    timer.begin("pool")
    clock.wait(2)
    start = timer.times()
    assert start.phases == (("sizes", 1.0), ("ranks", 3.0), ("meeting", 1.0), ("reading", 6.0), ("pool", 2.0))
    assert start.whole_s == 13.0
    assert start.bytes_read == 50


def test_the_rate_is_that_of_reading_and_packing_together() -> None:
    phases = (("sizes", 0.25), ("reading", 0.5), ("packing", 1.5))
    start = StartTimes(phases=phases, bytes_read=3_000_000_000)
    assert start.read_bytes_per_s == 1.5e9
    assert start.summary() == (
        "2.25 s (sizes 0.25, reading 0.50, packing 1.50); 3,000.0 MB of weights were read and packed at 1,500.0 MB/s"
    )
    assert StartTimes().read_bytes_per_s == 0.0


def test_the_log_says_each_phase_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    timer = StartTimer("pool", Hand())
    with caplog.at_level(logging.INFO):
        with timer.within("graphs"):
            assert "graphs" in caplog.messages[-1]
        timer.begin("graphs")
        timer.begin("first steps")
    assert [message.split(" with ")[1] for message in caplog.messages] == ["graphs", "first steps"]

"""Restores of prefixes that begin alike, at once."""

from core.config.cluster_config import EngineConfig
from core.types import Request, SamplingParams
from engine.planning.step_scheduler import StepScheduler
from tests.engine.fifo_policy import FifoPolicy

NUM_BLOCKS = 40


def request(name: str, num_tokens: int) -> Request:
    return Request(
        id=name, prompt=tuple(range(num_tokens)), sampling=SamplingParams(max_tokens=1), reply_to="f"
    )


def test_what_a_restore_has_twins_of_stays_until_it_has_ended() -> None:
    scheduler = StepScheduler(EngineConfig(block_size=1), NUM_BLOCKS, 1000, FifoPolicy())
    short, long = request("short", 11), request("long", 21)
    first, second = scheduler.prefixes.begin_restore(short, 10), scheduler.prefixes.begin_restore(long, 20)
    assert first is not None
    assert second is not None
    scheduler.prefixes.publish_restore(first, 10)
    scheduler.prefixes.publish_restore(second, 20)
    scheduler.prefixes.end_restore(first)
    scheduler.check_integrity()
    # Another prompt takes all the room that there is.
    other = Request(id="other", prompt=(99,) * 9, sampling=SamplingParams(max_tokens=1), reply_to="f")
    assert scheduler.load().num_available_blocks == 10
    scheduler.sequences.add(other)
    assert scheduler.plan(0.0) is not None
    scheduler.check_integrity()
    assert scheduler.prefixes.cached_prefix(long).num_usable == 20
    scheduler.prefixes.end_restore(second)
    scheduler.check_integrity()

"""What an ingress waits for when a model is to sleep or to wake up."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.ingress.delivery.model_sleep import ModelSleep
from core.errors import ReplicaLost
from core.messages import Message
from core.reports import Status
from core.sleep_messages import SleepAnswer
from sim.virtual_loop import LoopClock, run_virtual

STATUS = Status(nonce=0, why_not="", num_queued=0, instances=())


async def answered(address: str, question: Callable[[int], Message], *_: Any) -> SleepAnswer:
    return SleepAnswer(nonce=0)


def waking(num_lost: int) -> None:
    """Wake a model while the first `num_lost` questions for the status fail."""
    left = [num_lost]

    async def status() -> Status:
        left[0] -= 1
        if left[0] >= 0:
            raise ReplicaLost("the scheduler did not answer within 2 s")
        return STATUS

    async def run() -> None:
        schedulers, questions = SimpleNamespace(first="s", living=("s",)), SimpleNamespace(ask=answered)
        await ModelSleep(
            cast("Any", None), LoopClock(), cast("Any", schedulers), cast("Any", questions), status
        ).wake()

    run_virtual(run())


def test_a_scheduler_that_says_nothing_for_a_moment_fails_no_order() -> None:
    waking(3)


def test_an_order_ends_in_words_where_nothing_is_heard_any_more() -> None:
    with pytest.raises(ReplicaLost, match="not every instance woke up within 600 s"):
        waking(1_000_000)

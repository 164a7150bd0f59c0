"""What instances sleep and wake up by, on the wire."""

import pytest

from core.messages import Message
from core.sleep_messages import AskSleep, AskWake, Asleep, GoToSleep, KeepAwake, SleepAnswer, WakeUp
from net.codec import decode, encode

ASLEEP = Asleep(
    address="h:1",
    state="waking",
    level=2,
    prefills=True,
    decodes=False,
    held=True,
    wake_s=1.5,
    why="it fails",
)


@pytest.mark.parametrize(
    "message",
    [
        GoToSleep(level=1, pauses=True, timeout_s=2.0, held=True, drops=True),
        WakeUp(),
        ASLEEP,
        AskSleep(nonce=3, level=2, timeout_s=1.0),
        AskWake(4),
        SleepAnswer(4, "the model is always awake"),
        KeepAwake(float("inf")),
    ],
    ids=lambda message: type(message).__name__,
)
def test_each_message_is_read_as_it_was_written(message: Message) -> None:
    assert decode(encode(message)) == message

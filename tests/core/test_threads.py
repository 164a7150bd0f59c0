"""Work on threads whose callers are cancelled."""

import asyncio
import threading

import pytest

from core.threads import in_thread
from tests.patience import PATIENCE_S, until


async def test_a_cancelled_caller_ends_when_the_thread_has() -> None:
    begun, go_on = threading.Event(), threading.Event()
    undone: list[str] = []

    def work() -> str:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return "result"

    waiting = asyncio.create_task(in_thread(work, undo=undone.append))
    await until(begun.is_set)
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0.01)
    assert not waiting.done()
    assert not undone
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert undone == ["result"]


async def test_what_is_raised_behind_a_cancelled_caller_is_dropped() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        raise OSError("full")

    waiting = asyncio.create_task(in_thread(work))
    await until(begun.is_set)
    waiting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_caller_gets_the_result_or_what_was_raised() -> None:
    assert await in_thread(lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)

"""Which objects the garbage collector looks at, and when."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from core.garbage import IdleCollector, collect, leave_out_all_there_is
from tests.patience import PATIENCE_S


class Node:
    """Garbage that only a collector finds, once it is dropped."""

    def __init__(self) -> None:
        self.me = self


def old_garbage() -> weakref.ref[Node]:
    """Return garbage that has survived the younger generations' collections, which no longer look at it."""
    node = Node()
    gc.collect(1)
    gc.collect(1)
    return weakref.ref(node)


class Slow(Node):
    """Garbage whose end takes as long as a test likes."""

    def __init__(self, begun: threading.Event, may_end: threading.Event) -> None:
        super().__init__()
        self.begun, self.may_end = begun, may_end

    def __del__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)


@pytest.mark.parametrize("other", [collect, gc.collect])
def test_a_collection_beside_another_threads_finds_what_that_one_did_not(other: Callable[[], int]) -> None:
    begun, may_end = threading.Event(), threading.Event()
    Slow(begun, may_end)
    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(PATIENCE_S)
    ref = weakref.ref(Node())
    threading.Timer(0.05, may_end.set).start()
    collect()
    assert ref() is None
    thread.join()


@contextlib.asynccontextmanager
async def collecting(is_idle: list[bool], at_least_every_s: float = 3600.0):
    task = asyncio.create_task(IdleCollector(lambda: is_idle[0], at_least_every_s).run(look_every_s=0.01))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_gone(ref: weakref.ref[Node]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while ref() is not None:
            [[] for _ in range(20_000)]  # younger generations are collected as ever
            await asyncio.sleep(0.01)


async def test_full_collections_wait_until_nobody_waits() -> None:
    is_idle = [False]
    async with collecting(is_idle):
        ref = old_garbage()
        for _ in range(30):
            [[] for _ in range(20_000)]
            await asyncio.sleep(0.002)
        assert ref() is not None
        is_idle[0] = True
        await until_gone(ref)


async def test_they_do_not_wait_for_ever() -> None:
    async with collecting([False], at_least_every_s=0.05):
        await until_gone(old_garbage())


async def test_the_process_collects_as_before_when_it_ends() -> None:
    before = gc.get_threshold()
    async with collecting([False]):
        assert gc.get_threshold()[2] > 1_000_000
    assert gc.get_threshold() == before


@pytest.fixture
def thawed() -> Iterator[None]:
    """What was frozen before is frozen afterwards."""
    frozen = gc.get_freeze_count()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_what_is_loaded_is_not_looked_at_again() -> None:
    node = Node()
    ref = weakref.ref(node)
    leave_out_all_there_is()
    del node
    gc.collect()
    assert ref() is not None
    gc.unfreeze()
    gc.collect()
    assert ref() is None

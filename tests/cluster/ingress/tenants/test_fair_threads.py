"""Threads that tenants share: whose work goes on, what waits for what, and what ends."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from cluster.ingress.tenants import fair_threads
from cluster.ingress.tenants.fair_threads import FairThreads, Steps, at_once
from cluster.ingress.tenants.pieces import between_pieces
from core.errors import Overloaded
from tests.patience import PATIENCE_S, until

LONG, SHORT = 1 << 20, 1000


def burn(name: str, steps_done: list[str], num_steps: int) -> Callable[[], Steps[str]]:
    """Return work of steps that each take some processor time."""

    def steps() -> Steps[str]:
        for _ in range(num_steps):
            sum(range(20_000))
            steps_done.append(name)
            yield
        return name

    return steps


async def test_a_tenant_with_little_work_is_done_before_one_with_much() -> None:
    threads, done = FairThreads(num_long_threads=1), list[str]()
    much = [asyncio.create_task(threads.run("much", 1.0, LONG, burn("much", done, 50))) for _ in range(8)]
    await until(lambda: len(done) > 10)
    assert await threads.run("little", 1.0, LONG, burn("little", done, 20)) == "little"
    began, last = done.index("little"), len(done) - done[::-1].index("little")
    assert done[began:last].count("much") < 100, "they take turns"
    assert not all(task.done() for task in much)
    await asyncio.gather(*much)


async def test_a_tenant_of_double_weight_has_double_the_time() -> None:
    threads, done = FairThreads(num_long_threads=1), list[str]()
    started = threading.Event()

    def hold() -> None:
        started.wait(PATIENCE_S)

    held = asyncio.create_task(threads.run("other", 1.0, LONG, at_once(hold)))
    await asyncio.sleep(0)
    work = [
        threads.run(name, weight, LONG, burn(name, done, 200)) for name, weight in (("a", 2.0), ("b", 1.0))
    ]
    both = asyncio.gather(*work)
    await asyncio.sleep(0)
    started.set()
    await asyncio.gather(held, both)
    assert 1.4 < done[:150].count("a") / done[:150].count("b") < 2.8


async def test_short_work_does_not_wait_for_long_work() -> None:
    threads, free = FairThreads(num_long_threads=1), threading.Event()

    def hold() -> str:
        assert free.wait(PATIENCE_S)
        return "long"

    long = [asyncio.create_task(threads.run("one", 1.0, LONG, at_once(hold))) for _ in range(5)]
    async with asyncio.timeout(PATIENCE_S):
        assert await threads.run("other", 1.0, SHORT, at_once(lambda: "short")) == "short"
        assert await threads.run("one", 1.0, SHORT, at_once(lambda: "short")) == "short"
    assert not any(task.done() for task in long)
    free.set()
    assert await asyncio.gather(*long) == ["long"] * 5


async def test_work_that_nobody_waits_for_does_no_further_step() -> None:
    threads, done, free = FairThreads(num_long_threads=1), list[str](), threading.Event()

    def steps() -> Steps[None]:
        done.append("first")
        free.wait(PATIENCE_S)
        yield
        done.append("second")

    left = asyncio.create_task(threads.run("one", 1.0, LONG, steps))
    behind = asyncio.create_task(threads.run("one", 1.0, LONG, burn("never", done, 1)))
    await until(lambda: bool(done))
    left.cancel()
    behind.cancel()
    await asyncio.gather(left, behind, return_exceptions=True)
    free.set()
    assert await threads.run("one", 1.0, LONG, at_once(lambda: "next")) == "next"
    assert done == ["first"]


async def test_a_tenant_has_only_so_many_bytes_wait() -> None:
    threads, free = FairThreads(num_long_threads=1, max_waiting_bytes=3 * LONG), threading.Event()
    work = at_once(lambda: free.wait(PATIENCE_S))
    waiting = [asyncio.create_task(threads.run("one", 1.0, LONG, work)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=f"{3 * LONG} are the limit"):
        await threads.run("one", 1.0, SHORT, work)
    free.set()
    assert await threads.run("other", 1.0, LONG, work)
    await asyncio.gather(*waiting)
    assert await threads.run("one", 1.0, LONG, work), "what is done waits no more"


async def test_memory_is_given_back_once_for_all_long_work_of_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, soon, given_back = asyncio.get_running_loop(), list[Callable[[], None]](), list[str]()
    later = loop.call_later

    def call_later(delay_s: float, callback: Callable[..., None], *args: Any, **more: Any) -> Any:
        is_ours = delay_s == fair_threads.GIVE_BACK_AFTER_S
        return soon.append(callback) if is_ours else later(delay_s, callback, *args, **more)

    monkeypatch.setattr(loop, "call_later", call_later)
    monkeypatch.setattr(
        fair_threads, "give_back_memory", lambda: given_back.append(threading.current_thread().name)
    )
    threads = FairThreads(num_long_threads=1)
    for num_bytes in (SHORT, LONG, LONG):
        await threads.run("one", 1.0, num_bytes, at_once(int))
    assert len(soon) == 1
    assert not given_back, "no request waits for it"
    soon.pop()()
    await until(lambda: bool(given_back))
    assert given_back[0].startswith("bodies"), "the event loop goes on meanwhile"
    await threads.run("one", 1.0, LONG, at_once(int))
    assert len(soon) == 1


async def test_what_work_raises_is_raised() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await FairThreads().run("one", 1.0, SHORT, at_once(fail))


async def test_work_with_pythons_lock_leaves_others_most_of_the_time() -> None:
    def work() -> float:
        began_at = time.thread_time()
        sum(range(1_000_000))
        return time.thread_time() - began_at

    for others, least in ((False, 0.0), (True, 3.0)):
        threads = FairThreads(num_long_threads=1)
        if others:
            threads.note("other", 1.0)
        began_at = time.monotonic()
        first_s = await threads.run("one", 1.0, LONG, at_once(work), holds_lock=True)
        await threads.run("one", 1.0, LONG, at_once(work), holds_lock=True)
        assert time.monotonic() - began_at > (1 + least) * first_s


def pieces(num_pieces: int, worked_s: list[float]) -> None:
    for _ in range(num_pieces):
        between_pieces()
        began_at = time.thread_time()
        sum(range(100_000))
        worked_s.append(time.thread_time() - began_at)


async def test_long_work_beside_others_rests_between_its_pieces() -> None:
    for holds_lock in (False, True):
        threads, worked_s = FairThreads(num_long_threads=1), list[float]()
        threads.note("other", 1.0)
        began_at = time.monotonic()
        await threads.run("one", 1.0, LONG, at_once(partial(pieces, 50, worked_s)), holds_lock=holds_lock)
        assert time.monotonic() - began_at > 3.5 * sum(worked_s)


async def test_work_rests_less_where_more_threads_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s = list[float]()
    monkeypatch.setattr(time, "sleep", slept_s.append)
    for num_threads, holds_lock in ((4, False), (2, False), (4, True)):
        threads = FairThreads(num_long_threads=num_threads)
        threads.note("other", 1.0)
        slept_s.clear()
        work = at_once(partial(pieces, 30, []))
        await threads.run("one", 1.0, LONG, work, holds_lock=holds_lock)
        assert bool(slept_s) is (num_threads == 2 or holds_lock)


async def test_work_that_nobody_is_held_up_by_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s = list[float]()
    monkeypatch.setattr(time, "sleep", slept_s.append)
    between_pieces()  # in no work at all
    threads = FairThreads(num_long_threads=1)
    for tenant, num_bytes in (("alone", LONG), ("short", SHORT)):
        await threads.run(tenant, 1.0, num_bytes, at_once(lambda: pieces(10, [])), holds_lock=True)
        threads.note("other", 1.0)
    assert not slept_s


async def test_work_for_whose_thread_others_wait_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s, begun, waits = list[float](), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert waits.wait(PATIENCE_S)
        monkeypatch.setattr(time, "sleep", slept_s.append)
        pieces(10, [])

    threads = FairThreads(num_long_threads=1)
    first = asyncio.create_task(threads.run("one", 1.0, LONG, at_once(work), holds_lock=True))
    await until(begun.is_set)
    second = asyncio.create_task(threads.run("other", 1.0, LONG, at_once(int)))
    await asyncio.sleep(0)
    waits.set()
    await asyncio.gather(first, second)
    assert not slept_s


async def test_work_that_rests_goes_on_though_timers_come_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of uvloop do."""
    loop = asyncio.get_running_loop()
    later = loop.call_later

    def early(delay_s: float, *callback: Any, **more: Any) -> Any:
        return later(max(0.0, delay_s - 0.003), *callback, **more)

    monkeypatch.setattr(loop, "call_later", early)
    threads = FairThreads(num_long_threads=1)
    threads.note("other", 1.0)
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            await threads.run("one", 1.0, LONG, at_once(lambda: sum(range(1_000_000))), holds_lock=True)

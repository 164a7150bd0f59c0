"""Long work on requests' bodies, such as tokenising: on a few threads, of which each tenant has its share.

Work is done in steps. After each step the tenant that has had the least processor time by its weight goes on. Long work never
takes the last thread, so that short work waits for short steps only.

Work that holds Python's lock holds up everything else of this process. While other tenants ask for anything, each one has it do
that for an eighth of the time only, and each one's long work is done by a quarter of the threads for it. It rests between its
pieces. A step that did not is followed by its rest.

Invariant: a tenant that comes back after a pause begins with no less than the least that those who wait have had."""

import asyncio
import contextvars
import os
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from cluster.ingress.tenants.pieces import Pace
from core.errors import Overloaded
from core.garbage import give_back_memory

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that returns its result. Where it yields, other work may come in between."""

_LONG_BYTES = 64 << 10
_MAX_LONG_THREADS = 4
_MAX_WAITING_BYTES = 64 << 20
"""The most bytes of one tenant's bodies that are worked on or wait."""
_GIVE_BACK_BYTES = 256 << 10
"""A tokenizer takes about 200 bytes of memory for each byte of a text. The allocator keeps them unless it is asked."""
GIVE_BACK_AFTER_S = 5.0
"""How long after such a body it is asked, for all that came meanwhile: nobody else can allocate for some 10 ms."""
_RETRY_AFTER_S = 1.0
_LOCK_SHARE, _THREADS_SHARE = 0.125, 0.25
"""The part of Python's lock, and of the threads for long work, that a tenant's long work has while others are there."""
_TICK_S = 0.001
"""By how much a timer may come early: uvloop's count milliseconds."""
_ACTIVE_S = 1.0
"""How long after its last request a tenant counts as there."""


@dataclass(slots=True, eq=False)
class _Job:
    steps: Steps[Any]
    num_bytes: int
    holds_lock: bool
    pace: Pace
    done: "asyncio.Future[Any]"
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    @property
    def is_long(self) -> bool:
        return self.num_bytes > _LONG_BYTES


@dataclass(slots=True, eq=False)
class _Tenant:
    weight: float
    used_s: float
    """Processor time by weight."""
    asked_at: float = 0.0
    rests_until: float = 0.0
    num_jobs: int = 0
    num_bytes: int = 0
    short: deque[_Job] = field(default_factory=deque[_Job])
    long: deque[_Job] = field(default_factory=deque[_Job])

    def line_of(self, job: _Job) -> deque[_Job]:
        return self.long if job.is_long else self.short


@dataclass(frozen=True, slots=True)
class _Stepped:
    processor_s: float
    rested_for_s: float
    ended: bool
    result: Any
    error: Exception | None


class FairThreads:
    """Belongs to one event loop. Its threads end with it."""

    def __init__(
        self, num_long_threads: int | None = None, max_waiting_bytes: int = _MAX_WAITING_BYTES
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        self._num_long = num_long_threads or max(1, min(_MAX_LONG_THREADS, cores // 2))
        self._threads = ThreadPoolExecutor(self._num_long + 1, "bodies")
        self._max_waiting_bytes = max_waiting_bytes
        self._tenants: dict[str, _Tenant] = {}
        """The tenants that have work, or had some a moment ago."""
        self._num_running = self._num_long_running = 0
        self._gives_back = False
        """Whether memory will be given back soon."""

    @property
    def is_idle(self) -> bool:
        return not any(tenant.num_jobs for tenant in self._tenants.values())

    async def run(
        self,
        tenant: str,
        weight: float,
        num_bytes: int,
        work: Callable[[], Steps[T]],
        *,
        holds_lock: bool = False,
    ) -> T:
        """Return the result of `work` on a body of `num_bytes`. Cancelled, it does no further step. `holds_lock`: it keeps
        Python's lock. Raises what `work` raises, and Overloaded where too much of the tenant's waits."""
        own = self._tenant(tenant, weight, num_bytes)
        rest = _rest_of(_LOCK_SHARE if holds_lock else _THREADS_SHARE * self._num_long)
        pace = Pace(lambda: rest if self._are_others_there(own) and not self._do_others_wait(own) else 0.0)
        job = _Job(work(), num_bytes, holds_lock, pace, asyncio.get_running_loop().create_future())
        if job.is_long:
            pace.set_in(job.context)
        own.num_jobs += 1
        own.num_bytes += num_bytes
        own.line_of(job).append(job)
        self._dispatch()
        try:
            return await job.done
        finally:
            own.num_jobs -= 1
            own.num_bytes -= num_bytes
            if job in own.line_of(job):
                own.line_of(job).remove(job)

    def note(self, tenant: str, weight: float) -> None:
        """Note that a tenant asks for something, however short."""
        self._tenant(tenant, weight, 0)

    def _tenant(self, name: str, weight: float, num_bytes: int) -> _Tenant:
        """Return a tenant that may have so many bytes more. Raises Overloaded."""
        now = time.monotonic()
        own = self._tenants.get(name)
        if own is None:
            self._forget(now)
            least_s = min((other.used_s for other in self._tenants.values()), default=0.0)
            own = self._tenants[name] = _Tenant(weight, least_s)
        own.asked_at = now
        if own.num_bytes + num_bytes > self._max_waiting_bytes:
            raise Overloaded(
                f"{own.num_bytes} bytes of this tenant's requests are being read, and {self._max_waiting_bytes} are the limit",
                _RETRY_AFTER_S,
            )
        return own

    def _forget(self, now: float) -> None:
        """Forget those that have had no work for a while."""
        for name, tenant in list(self._tenants.items()):
            if not tenant.num_jobs and now > max(tenant.asked_at + _ACTIVE_S, tenant.rests_until):
                del self._tenants[name]

    def _dispatch(self) -> None:
        """Begin what may begin."""
        while self._num_running <= self._num_long and (found := self._next()) is not None:
            tenant, job = found
            self._num_running += 1
            self._num_long_running += job.is_long
            step = self._threads.submit(job.context.run, _step, job.steps, job.pace)
            asyncio.wrap_future(step).add_done_callback(partial(self._stepped, tenant, job))

    def _next(self) -> tuple[_Tenant, _Job] | None:
        now, may_be_long = time.monotonic(), self._num_long_running < self._num_long
        waiting = [
            one
            for one in self._tenants.values()
            if one.short or (may_be_long and one.long and one.rests_until <= now)
        ]
        if not waiting:
            return None
        tenant = min(waiting, key=_used_s)
        return tenant, (tenant.short or tenant.long).popleft()

    def _are_others_there(self, tenant: _Tenant) -> bool:
        """Return whether another tenant asked for anything a moment ago. Any thread may call it."""
        now = time.monotonic()
        return any(
            now - one.asked_at < _ACTIVE_S for one in list(self._tenants.values()) if one is not tenant
        )

    def _do_others_wait(self, tenant: _Tenant) -> bool:
        """Return whether long work of another tenant waits for a thread. Any thread may call it."""
        return any(one.long for one in list(self._tenants.values()) if one is not tenant)

    def _rest(self, tenant: _Tenant, worked_s: float) -> None:
        """Have the tenant's next long work wait for work with Python's lock, where others are there."""
        if self._are_others_there(tenant):
            tenant.rests_until = time.monotonic() + _rest_of(_LOCK_SHARE) * worked_s
            self._after_rest(tenant)

    def _after_rest(self, tenant: _Tenant) -> None:
        """Go on with the tenant's work once its rest is over, also where the timer comes early."""
        left_s = tenant.rests_until - time.monotonic()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s + _TICK_S, self._after_rest, tenant)
        else:
            self._dispatch()

    def _stepped(self, tenant: _Tenant, job: _Job, step: "asyncio.Future[_Stepped]") -> None:
        self._num_running -= 1
        self._num_long_running -= job.is_long
        stepped = step.result()
        tenant.used_s += stepped.processor_s / tenant.weight
        if job.holds_lock and job.is_long:
            self._rest(tenant, stepped.processor_s - stepped.rested_for_s)
        if stepped.ended and job.num_bytes > _GIVE_BACK_BYTES:
            self._give_back_soon()
        if job.done.done():
            job.steps.close()
        elif stepped.error is not None:
            job.done.set_exception(stepped.error)
        elif stepped.ended:
            job.done.set_result(stepped.result)
        else:
            tenant.line_of(job).append(job)
        self._dispatch()

    def _give_back_soon(self) -> None:
        if not self._gives_back:
            self._gives_back = True
            asyncio.get_running_loop().call_later(GIVE_BACK_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._gives_back = False
        self._threads.submit(give_back_memory)


def at_once(work: Callable[[], T]) -> Callable[[], Steps[T]]:
    """Return `work` as work of one step."""

    def steps() -> Steps[T]:
        return work()
        yield

    return steps


def finished(steps: Steps[T]) -> T:
    """Do all steps at once, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _step(steps: Steps[Any], pace: Pace) -> _Stepped:
    """Do one step, on a thread. No variable refers to the error: its traceback would keep the body alive in a circle."""
    began_at = time.thread_time()
    pace.begin()

    def stepped(*, ended: bool, result: Any = None, error: Exception | None = None) -> _Stepped:
        return _Stepped(time.thread_time() - began_at, pace.rested_for_s, ended, result, error)

    try:
        next(steps)
    except StopIteration as end:
        return stepped(ended=True, result=end.value)
    except Exception as error:
        return stepped(ended=True, error=error)
    return stepped(ended=False)


def _rest_of(share: float) -> float:
    """Return how many times as long as it worked a tenant's long work rests, to have its share of one thread."""
    return max(0.0, 1 / share - 1)


def _used_s(tenant: _Tenant) -> float:
    return tenant.used_s

"""The instances of one process. One whose engine has failed may be replaced, unless it keeps failing."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from cluster.instance.instance_parts import Role
from core.garbage import collect
from core.ports import Clock
from engine.sizing.devices import give_back_unused

log = logging.getLogger(__name__)

MAX_FAILURES: Final = 8
"""An instance that has failed so often in a row is not replaced any more. One request may end five before it is given up."""
STEADY_S: Final = 60.0
"""An instance that fails after having served for so long begins a new row."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0


class Kept(Protocol):
    """What is asked of an instance that serves."""

    @property
    def address(self) -> str: ...
    async def failed(self) -> BaseException: ...
    async def close(self) -> None: ...


K = TypeVar("K", bound=Kept)


class KeptInstances(Generic[K]):
    """Call `start` for each instance, and `close` at the end."""

    def __init__(
        self,
        make: Callable[[Role], Awaitable[K]],
        clock: Clock,
        on_trouble: Callable[[str], None],
        *,
        replaces: bool,
        rest: Callable[[Role, str], Awaitable[K]] | None = None,
    ) -> None:
        """`make` returns an instance that serves. `on_trouble` is told why an instance is missing; empty: none is any more.
        Without `replaces` one that has failed stays as it is. `rest`: instances begin asleep, and it makes one that nobody but an
        operator wakes, for the reason that it is given: such a one is made where others would be given up."""
        self._replaces, self._rest = replaces, rest
        self._make, self._clock, self._on_trouble = make, clock, on_trouble
        self._running: dict[int, K] = {}
        self._numbers = itertools.count()
        self._keeping: list[asyncio.Task[None]] = []
        self._troubles: dict[int, str] = {}
        self._given_up: dict[int, str] = {}

    @property
    def running(self) -> list[K]:
        """The instances, in the order of their starts. One that has failed is among them until another is made."""
        return [self._running[number] for number in sorted(self._running)]

    @property
    def given_up(self) -> str:
        """Why an instance is missing for good; empty where none is."""
        return "; ".join(self._given_up.values())

    async def start(self, role: Role) -> None:
        """Make an instance, and keep it. Raises what making it raises."""
        number = next(self._numbers)
        self._running[number] = await self._make(role)
        if self._replaces:
            self._keeping.append(asyncio.create_task(self._keep(number, role)))

    async def close(self) -> None:
        for task in self._keeping:
            task.cancel()
        for task in self._keeping:
            with suppress(asyncio.CancelledError):
                await task
        for instance in reversed(self.running):
            await instance.close()

    async def _keep(self, number: int, role: Role) -> None:
        num_failed = 0
        while True:
            began_at = self._clock.now()
            why = await self._end_of(number, role)
            is_steady = self._clock.now() - began_at >= STEADY_S
            num_failed = 1 if is_steady else min(MAX_FAILURES, num_failed + 1)
            most = MAX_FAILURES if self._rest is None else MAX_FAILURES + 1
            while num_failed < most and (failure := await self._replace(number, role, why, num_failed)):
                why, num_failed = failure, num_failed + 1
            if num_failed >= most:
                self._give_up(number, f"the {role} instance has failed {num_failed} times in a row: {why}")
                return

    async def _end_of(self, number: int, role: Role) -> str:
        """Wait until an instance has failed, give back all that it has, and return why it failed."""
        instance = self._running[number]
        error = await instance.failed()
        why = f"{type(error).__name__}: {error}"
        self._trouble(number, f"the {role} instance has failed ({why})")
        try:
            await instance.close()
        except Exception:
            log.exception("the %s instance %s could not give back all that it had", role, instance.address)
        return why

    async def _replace(self, number: int, role: Role, why: str, num_failed: int) -> str:
        """Start another instance after a pause. Returns why that has failed; empty where it serves, or sleeps."""
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (num_failed - 1), MAX_PAUSE_S)
        if self._rest is not None:  # until it says that it sleeps, others count the memory that it had
            pause_s = FIRST_PAUSE_S
        make, what = partial(self._make, role), "another one starts"
        if self._rest is not None and num_failed >= MAX_FAILURES:
            why = f"the {role} instance has failed {num_failed} times in a row: {why}"
            make, what = partial(self._rest, role, why), "another one sleeps until an operator wakes it,"
        text = (
            f"the {role} instance has failed ({why}); {what} in {pause_s:g} s "
            f"(failure {num_failed} of at most {MAX_FAILURES} in a row)"
        )
        log.error("%s", text)
        self._trouble(number, text)
        await self._clock.sleep(pause_s)
        self._running.pop(number, None)
        try:
            collect()  # the old one's weights and pool, before memory for the new one's is taken
            give_back_unused()
            self._running[number] = await make()
        except Exception as error:
            log.exception("another %s instance could not be started", role)
            return f"{type(error).__name__}: {error}"
        log.warning("the %s instance %s has taken its place", role, self._running[number].address)
        self._troubles.pop(number)
        self._on_trouble("; ".join(self._troubles.values()))
        return ""

    def _trouble(self, number: int, text: str) -> None:
        self._troubles[number] = text
        self._on_trouble("; ".join(self._troubles.values()))

    def _give_up(self, number: int, why: str) -> None:
        self._running.pop(number, None)
        self._given_up[number] = text = f"{why}. No other is started: restart this process"
        log.critical("%s", text)
        self._trouble(number, text)

"""Which schedulers there are, kept current: some die, and others replace them.

Invariant: an address is among `living` from when it was found until it is said to be lost, and `found` is called with it before
anything else is."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from core.ports import Clock, Resolve

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_MAX_RETRY_S = 5.0
"""The longest time that a lost one which is still listed is left alone while others live, since it may be stopped or cut off."""
_FORGOTTEN_S = 60.0
_MAX_AWAY = 64


@dataclass(frozen=True, slots=True)
class _Absence:
    since: float
    wait_s: float
    """The time before it is tried again."""


class Schedulers:
    """Finds schedulers while `run` runs. It looks for `count` of them and for `num_spares` more."""

    def __init__(
        self,
        resolve: Resolve,
        count: int,
        clock: Clock,
        found: Callable[[str], None],
        *,
        num_spares: int = 0,
    ) -> None:
        self._resolve, self._clock, self._found = resolve, clock, found
        self._count, self._num_spares = count + num_spares, num_spares
        self.living: tuple[str, ...] = ()
        """The living schedulers, by address."""
        self._in_order: list[str] = []
        """The living schedulers, in the order in which they were found."""
        self._away: dict[str, _Absence] = {}
        """The lost ones."""
        self._missing = asyncio.Event()
        self._missing.set()

    @property
    def first(self) -> str:
        """The scheduler that leads, as far as is known here; empty where none lives."""
        return self.living[0] if self.living else ""

    @property
    def placing(self) -> tuple[str, ...]:
        """The living schedulers that are asked for places. Those found last are the spares: one that has just come in place of a
        lost one has the most to learn."""
        if not self._num_spares:
            return self.living
        return tuple(sorted(self._in_order[: max(1, len(self._in_order) - self._num_spares)]))

    async def run(self) -> None:
        """Run for as long as its owner lives, until cancelled."""
        delay_s = _RETRY_S
        while True:
            await self._missing.wait()
            await self._look()
            if len(self.living) >= self._count:
                self._missing.clear()
                delay_s = _RETRY_S
            else:
                await self._clock.sleep(delay_s)
                delay_s = min(_MAX_RETRY_S, 2 * delay_s) if self.living else _RETRY_S

    def lose(self, address: str) -> bool:
        """Note that a scheduler cannot be reached any more. Returns False where it was not living."""
        if address not in self.living:
            return False
        now, last = self._clock.now(), self._away.pop(address, None)
        wait_s = _RETRY_S if last is None or now - last.since > _FORGOTTEN_S else 2 * last.wait_s
        self._away[address] = _Absence(now, min(_MAX_RETRY_S, wait_s))
        if len(self._away) > _MAX_AWAY:
            del self._away[next(iter(self._away))]
        self.living = tuple(other for other in self.living if other != address)
        self._in_order.remove(address)
        self._missing.set()
        return True

    async def _look(self) -> None:
        try:
            addresses = await self._resolve()
        except Exception as error:
            log.warning("cannot find the scheduler: %s", error)
            return
        for address in sorted(addresses):
            if address not in self.living and not self._stays_away(address):
                self.living = tuple(sorted((*self.living, address)))
                self._in_order.append(address)
                self._found(address)

    def _stays_away(self, address: str) -> bool:
        """Return whether a scheduler that was lost a moment ago is left alone. Where no other lives it is tried again at once."""
        absence = self._away.get(address)
        if absence is None:
            return False
        wait_s = absence.wait_s if self.living else _RETRY_S
        return self._clock.now() - absence.since < wait_s

"""An ingress's shares of the cluster's limits.

A request waits for a scheduler only where the ingress has too little of a limit left, and then for one answer. Output is counted
as it comes, and never waits. While no scheduler answers, an ingress lets in as much per minute as it did before."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.ingress.tenants.use_limits import Excess, Need
from core.errors import ReplicaLost
from core.limit_book import HOLD_S, MINUTE_S, LimitBook, SlidingWindow
from core.limit_messages import AskedShare, Limit, Share, Taken

AskShares = Callable[[tuple[AskedShare, ...]], Awaitable[Sequence[Share]]]
"""Raises ReplicaLost where no scheduler answers."""
TICK_S = 0.25
"""How often what is not used is given back, and more is taken ahead."""
ANSWER_S = 1.0
"""How long a request waits for an answer before it goes on with what the ingress had before."""
PATIENCE_S = 5.0
"""How long a request for which nothing is left here waits for a scheduler that does not answer."""
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No scheduler answers, and the ingress had too little of it before."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The state of a limit at one moment. `reset_s` is the time until the full amount may be taken again."""

    limit: Limit
    remaining: int
    reset_s: float


def own_book(now: Callable[[], float]) -> AskShares:
    """Return the shares of an ingress that is alone."""
    book = LimitBook()

    async def ask(asked: tuple[AskedShare, ...]) -> Sequence[Share]:
        return [book.ask("", each, now()) for each in asked]

    return ask


class Shares:
    """Belongs to one event loop."""

    def __init__(self, ask: AskShares, now: Callable[[], float]) -> None:
        self._ask, self._now = ask, now
        self._held: dict[tuple[str, str], _HeldShare] = {}
        self._ticking: asyncio.Task[None] | None = None

    def lease_from(self, ask: AskShares) -> None:
        """Take shares from here from now on."""
        self._ask = ask

    async def take(self, needs: Sequence[Need]) -> Excess | None:
        """Take all of it, or say what there is too little of."""
        self._tick_soon()
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while True:
            lacking = await self._take_or_lease(needs)
            if lacking is None or isinstance(lacking, Excess):
                return lacking
            if asyncio.get_running_loop().time() >= until:
                return Excess(None, 1.0)
            await asyncio.sleep(_RETRY_S)

    async def _take_or_lease(self, needs: Sequence[Need]) -> "Excess | Unanswered | None":
        """Take all of it from here and from a scheduler, or nothing."""
        had = [(need.limit, *self._of(need.limit).take(need.amount, self._now())) for need in needs]
        lacking = [
            lack
            for need, (_, amount, _) in zip(needs, had, strict=True)
            if (lack := self._of(need.limit).lack(need, amount)) is not None
        ]
        excess: Excess | Unanswered | None = Unanswered()
        try:
            excess = await self._answered(lacking) if lacking else None
        finally:
            if excess is not None:
                for limit, amount, granted_at in had:
                    self._of(limit).put_back(amount, granted_at, self._now())
        return excess

    async def _answered(self, needs: Sequence[Need]) -> "Excess | Unanswered | None":
        leasing, in_time = asyncio.ensure_future(self._lease(needs)), False
        try:
            async with asyncio.timeout(ANSWER_S):
                excess = await asyncio.shield(leasing)
            in_time = True
            return excess
        except (ReplicaLost, TimeoutError):
            return None if self._go_on_without(needs) else Unanswered()
        finally:
            if not in_time:
                leasing.add_done_callback(partial(self._came_late, needs))

    def _came_late(self, needs: Sequence[Need], leasing: "asyncio.Future[Excess | None]") -> None:
        """Keep here what was granted to a request that has not waited for it."""
        if not leasing.cancelled() and leasing.exception() is None and leasing.result() is None:
            for need in needs:
                self._of(need.limit).put_back(need.amount, self._now(), self._now())

    def spend(self, limit: Limit, amount: int) -> None:
        """Count what was used, whether it is there or not."""
        self._of(limit).spend(amount, self._now())
        self._tick_soon()

    def give_back(self, limit: Limit, amount: int, taken_at: float) -> None:
        """Give back what was taken then and is not used, or sequences that have ended."""
        if amount:
            self._of(limit).give_back(amount, taken_at, self._now())
            self._tick_soon()

    def balance(self, limit: Limit) -> Balance:
        return self._of(limit).balance()

    def _of(self, limit: Limit) -> "_HeldShare":
        key = limit.whose, limit.what
        found = self._held.get(key)
        if found is None:
            found = self._held[key] = _HeldShare(limit)
        found.limit = limit
        return found

    async def _lease(self, needs: Sequence[Need]) -> Excess | None:
        """Take all of it from a scheduler, or say what there is too little of. Raises ReplicaLost."""
        held = [self._of(need.limit) for need in needs]
        asked = tuple(one.asked(need, self._now()) for one, need in zip(held, needs, strict=True))
        try:
            shares = await self._ask(asked)
        except BaseException:
            for one, each in zip(held, asked, strict=True):
                one.not_answered(each, self._now())
            raise
        now, excess = self._now(), None
        for one, need, each in zip(held, needs, shares, strict=True):
            one.granted(each, now)
            if each.granted < max(need.least, need.amount):
                excess = excess or Excess(need.limit, each.wait_s)
        if excess is None:
            for one, need in zip(held, needs, strict=True):
                one.take(need.amount, now)
        return excess

    def _go_on_without(self, needs: Iterable[Need]) -> bool:
        """Take what the ingress may go on with while no scheduler answers, or nothing."""
        now, held = self._now(), [(self._of(need.limit), need) for need in needs]
        if not all(one.had_before(need, now) for one, need in held):
            return False
        for one, need in held:
            one.spend(need.amount, now)
        return True

    def _tick_soon(self) -> None:
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        """Settle with the scheduler for as long as there is anything to settle."""
        while any(one.is_open for one in self._held.values()):
            await asyncio.sleep(TICK_S)
            await self._settle()
        now = self._now()
        self._held = {key: one for key, one in self._held.items() if one.counts(now)}

    async def _settle(self) -> None:
        now = self._now()
        settled = [(one, one.settling(now)) for one in self._held.values() if one.is_open]
        try:
            shares = await self._ask(tuple(asked for _, asked in settled))
        except ReplicaLost:
            for one, asked in settled:
                one.not_answered(asked, self._now())
            return
        for (one, _), share in zip(settled, shares, strict=True):
            one.granted(share, self._now())


class _HeldShare:
    """What the ingress has of one limit."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._lots: deque[tuple[float, int]] = deque()
        """(when it was granted, how much of it is left)"""
        self._changes: list[tuple[float, int]] = []
        """(when, amount) that a scheduler is to count, or to count no more. Of sequences it is told all that there are."""
        self._used = SlidingWindow(MINUTE_S)
        self._running = 0
        """Sequences that run."""
        self._num_asked = 0
        """Questions that are not answered yet."""
        self._used_in_tick = 0
        self._before = 0
        """What the ingress had in the last minute, or at once, when a scheduler answered last."""
        self._free, self._reset_s = limit.most, 0.0

    @property
    def is_open(self) -> bool:
        return bool(self._lots or self._changes or self._running or self._num_asked)

    def counts(self, now: float) -> bool:
        return self.is_open or self._used.total(now) > 0

    def take(self, amount: int, now: float) -> tuple[int, float]:
        """Take up to `amount` from what is here. Return how much that is, and since when it is here."""
        taken, since = 0, now
        while taken < amount and self._lots:
            granted_at, there = self._lots.popleft()
            part, since = min(there, amount - taken), min(since, granted_at)
            if part < there:
                self._lots.appendleft((granted_at, there - part))
            taken += part
        self._count(taken, now)
        return taken, since

    def lack(self, need: Need, taken: int) -> Need | None:
        """Return what is missing where `taken` was here of a need."""
        if taken < need.amount or taken + self._left < need.least:
            return Need(need.limit, need.amount - taken, max(0, need.least - taken))
        return None

    def put_back(self, amount: int, granted_at: float, now: float) -> None:
        """Keep what was taken just now, and is not used."""
        if amount:
            self._lots.appendleft((granted_at, amount))
            self._count(-amount, now)

    def spend(self, amount: int, now: float) -> None:
        covered, _ = self.take(amount, now)
        if amount > covered:
            self._count(amount - covered, now)
            if not self._is_of_sequences:
                self._changes.append((now, amount - covered))

    def give_back(self, amount: int, taken_at: float, now: float) -> None:
        if self._is_of_sequences:
            self._running -= amount
            self._lots.append((now, amount))
        else:
            self._changes.append((taken_at, -amount))
            self._used.add(-amount, now, now - taken_at)

    def had_before(self, need: Need, now: float) -> bool:
        used = self._running if self._is_of_sequences else self._used.total(now)
        return used + max(need.amount, need.least) <= self._before

    def asked(self, need: Need, now: float) -> AskedShare:
        """Return what to ask for a request: its need, and as much ahead as was used a moment ago."""
        least = max(need.amount, need.least)
        return AskedShare(taken=self._told(now), least=least, wanted=least + self._ahead)

    def settling(self, now: float) -> AskedShare:
        """Return what to ask in a tick: unused lots are given back, and what will be needed is taken."""
        while self._lots and now - self._lots[0][0] >= HOLD_S:
            granted_at, amount = self._lots.popleft()
            if not self._is_of_sequences:
                self._changes.append((granted_at, -amount))
        wanted = max(0, self._ahead - self._left)
        self._used_in_tick = 0
        return AskedShare(taken=self._told(now), wanted=wanted)

    def granted(self, share: Share, now: float) -> None:
        self._num_asked -= 1
        if share.granted:
            self._lots.append((now, share.granted))
        self._free, self._reset_s = share.free, share.reset_s
        used = self._running if self._is_of_sequences else self._used.total(now)
        self._before = used + self._left

    def not_answered(self, asked: AskedShare, now: float) -> None:
        """Tell the next scheduler that answers."""
        self._num_asked -= 1
        if not self._is_of_sequences:
            self._changes += [(now - age_s, amount) for age_s, amount in asked.taken.amounts]

    def balance(self) -> Balance:
        owed = sum(amount for _, amount in self._changes)
        return Balance(self.limit, max(0, self._free + self._left - owed), self._reset_s)

    @property
    def _is_of_sequences(self) -> bool:
        return self.limit.what == "sequences"

    @property
    def _left(self) -> int:
        return sum(amount for _, amount in self._lots)

    @property
    def _ahead(self) -> int:
        return round(self._used_in_tick * HOLD_S / TICK_S)

    def _told(self, now: float) -> Taken:
        self._num_asked += 1
        if self._is_of_sequences:
            # An answer that is on its way may bring more: what there is then is not known.
            all_there_are = ((0.0, self._running + self._left),) if self._num_asked == 1 else ()
            return Taken(self.limit, all_there_are)
        changes, self._changes = self._changes, []
        return Taken(self.limit, tuple((max(0.0, now - at), amount) for at, amount in changes))

    def _count(self, amount: int, now: float) -> None:
        self._used_in_tick = max(0, self._used_in_tick + amount)
        if self._is_of_sequences:
            self._running += amount
        else:
            self._used.add(amount, now)

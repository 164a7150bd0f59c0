"""What all ingresses have taken of each limit, and what one of them may have now.

Invariant: no stretch of a minute has more than the limit, but for what is told as taken anyway. An ingress uses what it is
granted within `HOLD_S` or gives it back; so what was granted within `WINDOW_S` covers all that is used within a minute."""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from core.limit_messages import AskedShare, Limit, LimitBookCopy, Share, SharesTaken, Taken

MINUTE_S: Final = 60.0
HOLD_S: Final = 0.25
"""How long an ingress keeps what it has not used."""
_SLOT_S: Final = 0.05
_LATE_SLOTS: Final = 20
WINDOW_S: Final = MINUTE_S + HOLD_S + _SLOT_S
LEASE_S: Final = 10.0
"""How long sequences count of an ingress that is not heard any more."""
_AHEAD_PART: Final = 4
"""What is granted ahead of need is at most this part of what is left, so that all ingresses find some."""
_SEQUENCE_S: Final = 1.0
"""When who has too many sequences may try again."""


class SlidingWindow:
    """What was taken within the last `length_s` seconds, in slots of a twentieth of a second."""

    def __init__(self, length_s: float = WINDOW_S) -> None:
        self._length_s = length_s
        self._amounts: dict[int, int] = {}
        """By the slot's number."""
        self._numbers: list[int] = []
        """Numbers of the slots that count, sorted."""
        self._total = 0

    def total(self, now: float) -> int:
        num_over = 0
        while num_over < len(self._numbers) and self._leaves_at(self._numbers[num_over]) <= now:
            self._total -= self._amounts.pop(self._numbers[num_over])
            num_over += 1
        del self._numbers[:num_over]
        return self._total

    def add(self, amount: int, now: float, age_s: float = 0.0) -> None:
        """Count an amount as of `age_s` ago. A negative one is taken from what was counted then, or a moment before."""
        number = int((now - age_s) // _SLOT_S)
        if self._leaves_at(number) <= now:
            return
        if amount < 0:
            self._give_back(-amount, number)
        elif amount:
            if number not in self._amounts:
                insort(self._numbers, number)
            self._amounts[number] = self._amounts.get(number, 0) + amount
            self._total += amount

    def wait_s(self, amount: int, most: int, now: float) -> float:
        """Return when `amount` more are within `most`: 0 where they are, infinite where they never are."""
        if amount > most:
            return inf
        excess = self.total(now) + amount - most
        for number in self._numbers:
            if excess <= 0:
                break
            excess -= self._amounts[number]
            if excess <= 0:
                return self._leaves_at(number) - now
        return 0.0

    def reset_s(self, now: float) -> float:
        return self._leaves_at(self._numbers[-1]) - now if self.total(now) else 0.0

    def amounts(self, now: float) -> tuple[tuple[float, int], ...]:
        """Return what counts now: (how many seconds ago, amount)."""
        self.total(now)
        return tuple(
            (max(0.0, now - (number + 0.5) * _SLOT_S), self._amounts[number]) for number in self._numbers
        )

    def _give_back(self, amount: int, number: int) -> None:
        """An ingress learns of a grant after it was made, so it names a moment that is a little late."""
        for slot in range(number, number - _LATE_SLOTS, -1):
            part = min(amount, self._amounts.get(slot, 0))
            if part:
                self._amounts[slot] -= part
                self._total -= part
                amount -= part
            if not amount:
                return

    def _leaves_at(self, number: int) -> float:
        return number * _SLOT_S + self._length_s


class HeldSequences:
    """How many sequences each ingress has. One that is not heard for `LEASE_S` has none."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, float]] = {}

    def of_each(self, now: float) -> dict[str, int]:
        self._held = {who: held for who, held in self._held.items() if held[0] and held[1] > now}
        return {who: count for who, (count, _) in self._held.items()}

    def has(self, ingress: str, count: int, now: float) -> None:
        self._held[ingress] = count, now + LEASE_S

    def lose(self, ingress: str) -> None:
        self._held.pop(ingress, None)


@dataclass(slots=True)
class _Entry:
    limit: Limit
    window: SlidingWindow
    held: HeldSequences

    def total(self, now: float) -> int:
        if self.limit.what == "sequences":
            return sum(self.held.of_each(now).values())
        return self.window.total(now)

    def count(self, ingress: str, amounts: Iterable[tuple[float, int]], now: float) -> None:
        for age_s, amount in amounts:
            if self.limit.what == "sequences":
                self.held.has(ingress, amount, now)
            else:
                self.window.add(amount, now, age_s)

    def grant(self, ingress: str, amount: int, now: float) -> None:
        had = self.held.of_each(now).get(ingress, 0) if self.limit.what == "sequences" else 0
        self.count(ingress, [(0.0, had + amount)], now)

    def wait_s(self, amount: int, now: float) -> float:
        if self.limit.what == "sequences":
            return _SEQUENCE_S if amount <= self.limit.most else inf
        return self.window.wait_s(amount, self.limit.most, now)


class LimitBook:
    """Feed it with `now` never going back."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._swept_at = 0.0

    def ask(self, ingress: str, asked: AskedShare, now: float) -> Share:
        """Count what is taken, and grant what there is. What is granted counts as taken from now on."""
        self._sweep(now)
        entry = self._entry(asked.taken.limit)
        entry.count(ingress, asked.taken.amounts, now)
        free = entry.limit.most - entry.total(now)
        if free < asked.least:
            entry.grant(ingress, 0, now)
            wait_s = entry.wait_s(asked.least, now)
            return Share(granted=0, free=free, wait_s=wait_s, reset_s=entry.window.reset_s(now))
        granted = max(asked.least, min(asked.wanted, free // _AHEAD_PART))
        entry.grant(ingress, granted, now)
        return Share(granted=granted, free=free - granted, reset_s=entry.window.reset_s(now))

    def copied(self, ingress: str, asked: AskedShare, share: Share, now: float) -> Taken:
        """Return what another book is to count of what was asked and granted here just now."""
        limit = asked.taken.limit
        if limit.what == "sequences":
            return Taken(limit, ((0.0, self._entry(limit).held.of_each(now).get(ingress, 0)),))
        return Taken(limit, (*asked.taken.amounts, *(((0.0, share.granted),) if share.granted else ())))

    def note(self, told: SharesTaken, now: float) -> None:
        """Count what an ingress was granted by another scheduler."""
        for taken in told.taken:
            self._entry(taken.limit).count(told.ingress, taken.amounts, now)

    def lose(self, ingress: str) -> None:
        """Count no sequences of an ingress that is dead. What it took per minute was used, or leaves with its minute."""
        for entry in self._entries.values():
            entry.held.lose(ingress)

    def whole(self, now: float) -> LimitBookCopy:
        """Return all that counts, for another book."""
        found: list[SharesTaken] = []
        for entry in self._entries.values():
            if amounts := entry.window.amounts(now):
                found.append(SharesTaken("", (Taken(entry.limit, amounts),)))
            for ingress, count in entry.held.of_each(now).items():
                found.append(SharesTaken(ingress, (Taken(entry.limit, ((0.0, count),)),)))
        return LimitBookCopy(tuple(found))

    def _entry(self, limit: Limit) -> _Entry:
        key = limit.whose, limit.what
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(limit, SlidingWindow(), HeldSequences())
        entry.limit = limit
        return entry

    def _sweep(self, now: float) -> None:
        """Forget limits of which nothing counts, now and then."""
        if now - self._swept_at > MINUTE_S:
            self._swept_at = now
            for key in [key for key, entry in self._entries.items() if not entry.total(now)]:
                del self._entries[key]

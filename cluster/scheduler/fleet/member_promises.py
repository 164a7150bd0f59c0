"""What was promised to an instance. Each promise is counted once, as unsettled or as settled, until it is removed."""

from math import inf
from typing import Final

from cluster.scheduler.fleet.member_facts import ReportedFacts
from cluster.scheduler.fleet.out_links import OutLinks
from cluster.scheduler.fleet.promise import Promise, PromiseSum
from cluster.scheduler.fleet.promised_prefixes import PromisedPrefixes
from core.reports import Register

NO_LEVEL: Final = 1 << 30
"""A level above every class's priority."""


class PromisedFacts(ReportedFacts):
    def __init__(self, info: Register) -> None:
        super().__init__(info)
        self.out_links = OutLinks()
        self._unsettled: dict[str, Promise] = {}
        self._settled: dict[str, Promise] = {}
        self._unsettled_sum = PromiseSum()
        self._settled_sum = PromiseSum()
        self._chains = PromisedPrefixes()
        self._tpots: dict[float, int] = {}
        self._levels: dict[int, int] = {}
        """Level -> number of promises."""
        self.lowest_level = NO_LEVEL
        """The lowest level of the promises here; `NO_LEVEL` when there is none."""
        self.tightest_tpot_s = inf
        """The tightest target of the sequences that were placed here to decode."""

    @property
    def num_promises(self) -> int:
        return len(self._unsettled) + len(self._settled)

    def _add(self, key: str, promise: Promise) -> None:
        assert key not in self._unsettled, key
        self._unsettled[key] = promise
        self._unsettled_sum.add(promise, 1)
        self._levels[promise.level] = self._levels.get(promise.level, 0) + 1
        self.lowest_level = min(self.lowest_level, promise.level)
        if promise.hashes:
            self._chains.add(key, promise.hashes)
        if promise.sent_bytes and self.info.reports_links:
            self.out_links.reserve(key, promise.receiver, promise.sent_bytes)
        if promise.num_seqs:
            self._tpots[promise.tpot_s] = self._tpots.get(promise.tpot_s, 0) + 1
            self.tightest_tpot_s = min(self.tightest_tpot_s, promise.tpot_s)

    def _settle(self, key: str) -> None:
        promise = self._settled[key] = self._unsettled.pop(key)
        self._unsettled_sum.add(promise, -1)
        self._settled_sum.add(promise, 1)

    def _remove(self, key: str) -> bool:
        """Remove a promise. Returns False when there is none."""
        if (promise := self._unsettled.pop(key, None)) is not None:
            self._unsettled_sum.add(promise, -1)
        elif (promise := self._settled.pop(key, None)) is not None:
            self._settled_sum.add(promise, -1)
        else:
            return False
        self.out_links.give_back(key)
        level = promise.level
        self._levels[level] -= 1
        if not self._levels[level]:
            del self._levels[level]
            self.lowest_level = min(self._levels, default=NO_LEVEL)
        if promise.hashes:
            self._chains.remove(key, promise.hashes)
        if promise.num_seqs:
            _take_one(self._tpots, promise.tpot_s)
            self.tightest_tpot_s = min(self._tpots, default=inf)
        return True


def _take_one(counter: dict[float, int], key: float) -> None:
    if (left := counter[key] - 1) > 0:
        counter[key] = left
    else:
        del counter[key]

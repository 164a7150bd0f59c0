"""What was reserved to an instance. Each reservation is counted once, as unsettled or as settled, until it is removed."""

from math import inf
from typing import Final

from cluster.scheduler.fleet.member_facts import ReportedFacts
from cluster.scheduler.fleet.out_links import OutLinks
from cluster.scheduler.fleet.reservation import PlacementReservation, ReservationSum
from cluster.scheduler.fleet.reserved_prefixes import ReservedPrefixes
from core.reports import Register

NO_LEVEL: Final = 1 << 30
"""A level above every class's priority."""


class ReservedFacts(ReportedFacts):
    def __init__(self, info: Register) -> None:
        super().__init__(info)
        self.out_links = OutLinks()
        self._unsettled: dict[str, PlacementReservation] = {}
        self._settled: dict[str, PlacementReservation] = {}
        self._unsettled_sum = ReservationSum()
        self._settled_sum = ReservationSum()
        self._chains = ReservedPrefixes()
        self._tpots: dict[float, int] = {}
        self._levels: dict[int, int] = {}
        """Level -> number of reservations."""
        self.lowest_level = NO_LEVEL
        """The lowest level of the reservations here; `NO_LEVEL` when there is none."""
        self.tightest_tpot_s = inf
        """The tightest target of the sequences that were placed here to decode."""

    @property
    def num_reservations(self) -> int:
        return len(self._unsettled) + len(self._settled)

    def _add(self, key: str, reservation: PlacementReservation) -> None:
        assert key not in self._unsettled, key
        self._unsettled[key] = reservation
        self._unsettled_sum.add(reservation, 1)
        self._levels[reservation.level] = self._levels.get(reservation.level, 0) + 1
        self.lowest_level = min(self.lowest_level, reservation.level)
        if reservation.hashes:
            self._chains.add(key, reservation.hashes)
        if reservation.sent_bytes and self.info.reports_links:
            self.out_links.reserve(key, reservation.receiver, reservation.sent_bytes)
        if reservation.num_seqs:
            self._tpots[reservation.tpot_s] = self._tpots.get(reservation.tpot_s, 0) + 1
            self.tightest_tpot_s = min(self.tightest_tpot_s, reservation.tpot_s)

    def _settle(self, key: str) -> None:
        reservation = self._settled[key] = self._unsettled.pop(key)
        self._unsettled_sum.add(reservation, -1)
        self._settled_sum.add(reservation, 1)

    def _remove(self, key: str) -> bool:
        """Remove a reservation. Returns False when there is none."""
        if (reservation := self._unsettled.pop(key, None)) is not None:
            self._unsettled_sum.add(reservation, -1)
        elif (reservation := self._settled.pop(key, None)) is not None:
            self._settled_sum.add(reservation, -1)
        else:
            return False
        self.out_links.give_back(key)
        level = reservation.level
        self._levels[level] -= 1
        if not self._levels[level]:
            del self._levels[level]
            self.lowest_level = min(self._levels, default=NO_LEVEL)
        if reservation.hashes:
            self._chains.remove(key, reservation.hashes)
        if reservation.num_seqs:
            _take_one(self._tpots, reservation.tpot_s)
            self.tightest_tpot_s = min(self._tpots, default=inf)
        return True


def _take_one(counter: dict[float, int], key: float) -> None:
    if (left := counter[key] - 1) > 0:
        counter[key] = left
    else:
        del counter[key]

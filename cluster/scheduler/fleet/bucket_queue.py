"""Instances in rough order of a quantity, so that the least and the most loaded are found without looking at all.

Each stands on the shelf of its quantity; to move one, and to find the lowest shelf that is not empty, take constant time. Those
on one shelf count as equal, and which of them is taken is drawn: schedulers that do not see each other do not all take the first.

Invariant: a seat belongs to one set of shelves, its shelf and position say where it is found there, and the bits of `_filled` are
those of the shelves that are not empty."""

from math import log2
from typing import Final

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.rng import Draws

_PER_DOUBLING: Final = 8
HIGHEST: Final = 255
NOWHERE: Final = -1


def shelf_of(quantity: float, unit: float) -> int:
    """0 for nothing; else shelves that are `unit` / 11 wide at first and 9 % of the quantity later."""
    if quantity <= 0:
        return 0
    return min(HIGHEST, 1 + int(_PER_DOUBLING * log2(1 + quantity / unit)))


class Seat:
    """Where one member stands on some shelves; they alone move it."""

    __slots__ = ("member", "position", "shelf")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.shelf = NOWHERE
        self.position = 0


class Shelves:
    def __init__(self) -> None:
        self._shelves: dict[int, list[Seat]] = {}
        self._filled = 0
        self._num_seated = 0

    def __len__(self) -> int:
        return self._num_seated

    def put(self, seat: Seat, shelf: int) -> None:
        """To that shelf, wherever it was here."""
        if seat.shelf == shelf:
            return
        self.take(seat)
        seats = self._shelves.get(shelf)
        if seats is None:
            seats = self._shelves[shelf] = []
        if not seats:
            self._filled |= 1 << shelf
        seat.shelf, seat.position = shelf, len(seats)
        seats.append(seat)
        self._num_seated += 1

    def take(self, seat: Seat) -> None:
        """Away from here; nothing happens where it is not."""
        shelf = seat.shelf
        if shelf == NOWHERE:
            return
        seats = self._shelves[shelf]
        last = seats.pop()
        if last is not seat:
            seats[seat.position] = last
            last.position = seat.position
        elif not seats:
            self._filled &= ~(1 << shelf)
        seat.shelf = NOWHERE
        self._num_seated -= 1

    def one_low(self, draws: Draws) -> Member | None:
        """One of the lowest shelf; None: there is nobody."""
        if not self._filled:
            return None
        return _one(self._shelves[(self._filled & -self._filled).bit_length() - 1], draws)

    def one_high(self, draws: Draws, at_most: int = HIGHEST) -> Member | None:
        """One of the highest shelf that is not above `at_most`."""
        if not (filled := self._filled & ((2 << at_most) - 1)):
            return None
        return _one(self._shelves[filled.bit_length() - 1], draws)

    def lowest(self, count: int, draws: Draws) -> list[Member]:
        """Up to `count`, from the lowest shelf upwards."""
        found: list[Member] = []
        filled = self._filled
        while filled and len(found) < count:
            shelf = (filled & -filled).bit_length() - 1
            self._some(shelf, count - len(found), draws, found)
            filled &= filled - 1
        return found

    def _some(self, shelf: int, count: int, draws: Draws, found: list[Member]) -> None:
        seats = self._shelves[shelf]
        size = len(seats)
        first = draws.below(size) if size > count else 0
        found += [seats[(first + index) % size].member for index in range(min(size, count))]


def _one(seats: list[Seat], draws: Draws) -> Member:
    return seats[draws.below(len(seats)) if len(seats) > 1 else 0].member

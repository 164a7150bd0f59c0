"""Instances in rough order of a quantity, so that the least and the most loaded are found without looking at all. Pure.

Each stands on the shelf of its quantity; to move one, and to find the lowest shelf that is not empty, take constant time. Those
on one shelf count as equal, and which of them is taken is drawn: schedulers that do not see each other do not all take the first.

Invariant: an address is on one shelf at most, and the bits of `_filled` are those of the shelves that are not empty."""

from math import log2

from cluster.draws import Draws
from cluster.fleet import Member

_PER_DOUBLING = 8
HIGHEST = 255


def shelf_of(quantity: float, unit: float) -> int:
    """0 for nothing; else shelves that are `unit` / 11 wide at first and 9 % of the quantity later."""
    if quantity <= 0:
        return 0
    return min(HIGHEST, 1 + int(_PER_DOUBLING * log2(1 + quantity / unit)))


class Shelves:
    def __init__(self) -> None:
        self._shelves: dict[int, list[Member]] = {}
        self._filled = 0
        self._places: dict[str, tuple[int, int]] = {}
        """Shelf of each address, and its position there."""

    def __len__(self) -> int:
        return len(self._places)

    def put(self, member: Member, shelf: int) -> None:
        """To that shelf, wherever it was."""
        address = member.info.address
        if (place := self._places.get(address)) is not None:
            if place[0] == shelf and self._shelves[shelf][place[1]] is member:
                return
            self.take(address)
        members = self._shelves.setdefault(shelf, [])
        self._places[address] = shelf, len(members)
        members.append(member)
        self._filled |= 1 << shelf

    def take(self, address: str) -> None:
        """Away from here; nothing happens where it is not."""
        if (place := self._places.pop(address, None)) is None:
            return
        shelf, position = place
        members = self._shelves[shelf]
        last = members.pop()
        if position < len(members):
            members[position] = last
            self._places[last.info.address] = place
        if not members:
            self._filled &= ~(1 << shelf)

    def one_low(self, draws: Draws) -> Member | None:
        """One of the lowest shelf; None: there is nobody."""
        if not self._filled:
            return None
        members = self._shelves[(self._filled & -self._filled).bit_length() - 1]
        return members[draws.below(len(members))] if len(members) > 1 else members[0]

    def one_high(self, draws: Draws, at_most: int = HIGHEST) -> Member | None:
        """One of the highest shelf that is not above `at_most`."""
        if not (filled := self._filled & ((2 << at_most) - 1)):
            return None
        members = self._shelves[filled.bit_length() - 1]
        return members[draws.below(len(members))] if len(members) > 1 else members[0]

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
        members = self._shelves[shelf]
        size = len(members)
        if size <= count:
            found += members
            return
        first = draws.below(size)
        found += members[first : first + count]
        found += members[: max(0, first + count - size)]

"""Instances by where they stand: the least loaded on a host, in an NVLink domain, in a rack. Pure.

Invariant: a group is known while an instance of it is, and every instance has a seat in each of its groups."""

from cluster.draws import Draws
from cluster.fleet import Member
from cluster.shelves import Seat, Shelves

Group = tuple[str, ...]


class Neighbours:
    def __init__(self) -> None:
        self._shelves: dict[Group, Shelves] = {}
        self._seats: dict[str, list[tuple[Shelves, Seat]]] = {}
        """Of each instance, smallest group first."""

    def put(self, member: Member, shelf: int) -> None:
        seats = self._seats.get(member.address)
        if seats is None:
            groups = [self._shelves.setdefault(group, Shelves()) for group in member.spot.groups]
            seats = self._seats[member.address] = [(shelves, Seat(member)) for shelves in groups]
        for shelves, seat in seats:
            shelves.put(seat, shelf)

    def take(self, member: Member) -> None:
        for shelves, seat in self._seats.pop(member.address, ()):
            shelves.take(seat)
        for group in member.spot.groups:
            if group in self._shelves and not len(self._shelves[group]):
                del self._shelves[group]

    def nearest(self, member: Member, draws: Draws) -> Member | None:
        """The least loaded of the smallest group in which there is one; None where nothing is near."""
        seats = self._seats.get(member.address)
        if seats is not None:
            return seats[0][0].one_low(draws)
        for group in member.spot.groups:
            if (shelves := self._shelves.get(group)) is not None:
                return shelves.one_low(draws)
        return None

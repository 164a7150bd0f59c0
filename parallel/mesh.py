"""Where each rank of an instance stands: its place on the axes pp, ep and tp. Pure.

Every combination of places is one rank. Neighbours on tp have neighbouring numbers, since they talk the most; then come ep
and pp. `tp` splits matrices and attention heads, `pp` layers and `ep` experts; ranks that differ on ep alone hold the same
attention."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Axis = Literal["pp", "ep", "tp"]


@dataclass(frozen=True, slots=True)
class Place:
    pp: int
    ep: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp} ep{self.ep} tp{self.tp}"


@dataclass(frozen=True, slots=True)
class Mesh:
    pp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.ep * self.tp

    def place(self, rank: int) -> Place:
        rest, tp = divmod(rank, self.tp)
        pp, ep = divmod(rest, self.ep)
        return Place(pp, ep, tp)

    def rank(self, place: Place) -> int:
        return (place.pp * self.ep + place.ep) * self.tp + place.tp

    def group(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from `rank` on `axis` only, itself included, in the axis' order."""
        place, size = self.place(rank), {"pp": self.pp, "ep": self.ep, "tp": self.tp}[axis]
        return tuple(self.rank(replace(place, **{axis: index})) for index in range(size))

    def groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """All groups of an axis; each rank is in one."""
        for rank in range(self.size):
            group = self.group(rank, axis)
            if group[0] == rank:
                yield group

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep))
        return " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one rank"


ONE_RANK = Mesh()

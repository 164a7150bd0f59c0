"""Where each rank of an instance stands: its place on the axes pp, dp, ep and tp.

Every combination of places is one rank. Neighbours on tp have neighbouring numbers, since they talk the most; then come ep, dp
and pp. `tp` splits matrices and attention heads, `pp` layers and `dp` sequences. Experts are spread over dp x ep: ranks that
differ on ep alone hold the same attention and serve the same sequences, those that differ on dp serve others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Axis = Literal["pp", "dp", "ep", "tp"]


@dataclass(frozen=True, slots=True)
class MeshPlace:
    pp: int
    dp: int
    ep: int
    tp: int

    def __str__(self) -> str:
        return f"pp{self.pp} dp{self.dp} ep{self.ep} tp{self.tp}"


@dataclass(frozen=True, slots=True)
class Mesh:
    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.ep * self.tp

    @property
    def num_expert_ranks(self) -> int:
        """The number of ranks among which a layer's experts are spread."""
        return self.dp * self.ep

    def place(self, rank: int) -> MeshPlace:
        rest, tp = divmod(rank, self.tp)
        rest, ep = divmod(rest, self.ep)
        pp, dp = divmod(rest, self.dp)
        return MeshPlace(pp, dp, ep, tp)

    def rank(self, place: MeshPlace) -> int:
        return ((place.pp * self.dp + place.dp) * self.ep + place.ep) * self.tp + place.tp

    def group(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on `axis` only, itself included, in the axis's order."""
        place, size = self.place(rank), getattr(self, axis)
        return tuple(self.rank(replace(place, **{axis: index})) for index in range(size))

    def expert_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share a layer's experts with `rank`: they differ on dp and ep only."""
        place = self.place(rank)
        return tuple(
            self.rank(replace(place, dp=dp, ep=ep)) for dp in range(self.dp) for ep in range(self.ep)
        )

    def groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """Return all groups of an axis. Each rank is in one."""
        for rank in range(self.size):
            group = self.group(rank, axis)
            if group[0] == rank:
                yield group

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep))
        return " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "one rank"


ONE_RANK = Mesh()

"""How one placement of experts becomes another, a few experts at a time.

Invariant: after each part every expert has a slot, so rows can be routed by what is there then. Slots of experts that have other
copies are overwritten first. What is left are cycles of experts that are nowhere else. They move around one, or around as much of
it as may move at once: an expert that has lost its slot waits in the slot that the first one has left."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel.balance import Placement


@dataclass(frozen=True, slots=True)
class Move:
    """An expert's weights are copied from slot `source` to slot `slot`, counted over all ranks."""

    source: int
    slot: int


def moved(slots: Placement, moves: Sequence[Move]) -> Placement:
    """Return the slots after `moves`, all of which read what was there before."""
    out = list(slots)
    for move in moves:
        out[move.slot] = slots[move.source]
    return tuple(out)


def next_moves(now: Placement, target: Placement, num_ranks: int, most: int) -> tuple[Move, ...]:
    """Return what is to be done first on the way from `now` to `target`; nothing when they are equal.

    No rank sends more than `most` experts (at least 1) to others, or gets more from them. Each call makes some slots right, and
    none that was right wrong."""
    part = _Part(now, target, num_ranks, most)
    part.overwrite_copies()
    part.turn_cycles()
    return tuple(part.moves)


class _Part:
    """Moves that are done together."""

    def __init__(self, now: Placement, target: Placement, num_ranks: int, most: int) -> None:
        self.moves: list[Move] = []
        self._now, self._target, self._most = now, target, most
        self._per_rank = len(now) // num_ranks
        self._wrong = {slot for slot, expert in enumerate(now) if target[slot] != expert}
        """Slots that are to change and do not do so yet."""
        self._copies = Counter(now)
        """The number of copies of each expert when these moves are done."""
        self._holders: dict[int, list[int]] = {}
        for slot, expert in enumerate(now):
            self._holders.setdefault(expert, []).append(slot)
        self._sent, self._received = [0] * num_ranks, [0] * num_ranks

    def overwrite_copies(self) -> None:
        """Overwrite copies. Each move may leave another expert with a copy more, whose former slot can then be overwritten,
        too."""
        found = True
        while found:
            found = False
            for slot in sorted(self._wrong):
                if self._copies[self._now[slot]] > 1 and (move := self._from_best_holder(slot)) is not None:
                    self._copies[self._now[slot]] -= 1
                    self._copies[self._target[slot]] += 1
                    self._wrong.remove(slot)
                    self._count(move, 1)
                    self.moves.append(move)
                    found = True

    def turn_cycles(self) -> None:
        """Turn cycles of experts that have no other copy."""
        wanted = {self._target[slot]: slot for slot in sorted(self._wrong, reverse=True)}
        for first in sorted(self._wrong):
            if first in self._wrong:
                turn: list[Move] = []
                for longer in self._turns(first, wanted):
                    self._count_all(turn, -1)
                    self._count_all(longer, 1)
                    if not self._is_allowed():
                        self._count_all(longer, -1)
                        self._count_all(turn, 1)
                        break
                    turn = longer
                self._wrong -= {move.slot for move in turn}
                self.moves += turn

    def _turns(self, first: int, wanted: dict[int, int]) -> Iterator[list[Move]]:
        """Yield cycles around 2 slots, around 3 ... until all slots are right. What the last slot held goes to `first`."""
        slots = [first]
        while (after := wanted.get(self._now[slots[-1]])) in self._wrong and after != first:
            if self._copies[self._now[slots[-1]]] > 1:
                return
            slots.append(after)
            yield [Move(source, slot) for source, slot in zip(slots, [*slots[1:], first], strict=True)]

    def _from_best_holder(self, slot: int) -> Move | None:
        """Return the slot to copy from: on the same rank, or else on the one that sends the least. None where too many are under
        way."""
        rank = slot // self._per_rank

        def cost(source: int) -> tuple[bool, int, int]:
            holder = source // self._per_rank
            return holder != rank, self._sent[holder], source

        source = min(self._holders[self._target[slot]], key=cost)
        is_remote, num_sent, _ = cost(source)
        if is_remote and max(num_sent, self._received[rank]) >= self._most:
            return None
        return Move(source, slot)

    def _count_all(self, moves: Sequence[Move], sign: int) -> None:
        for move in moves:
            self._count(move, sign)

    def _count(self, move: Move, sign: int) -> None:
        source, rank = move.source // self._per_rank, move.slot // self._per_rank
        if source != rank:
            self._sent[source] += sign
            self._received[rank] += sign

    def _is_allowed(self) -> bool:
        return max(*self._sent, *self._received) <= self._most

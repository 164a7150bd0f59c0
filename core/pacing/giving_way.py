"""Who gives up blocks for a sequence that lacks some: lower classes first, and then such as are ahead of their pace."""

from collections.abc import Iterable, Sized
from typing import Protocol, TypeVar

from core.ports import SchedulerPolicy, ServedSequence


class HoldsBlocks(ServedSequence, Protocol):
    @property
    def block_ids(self) -> Sized: ...


H = TypeVar("H", bound=HoldsBlocks)


def giving_way(
    policy: SchedulerPolicy[H], below: Iterable[H], ahead: Iterable[H], num_blocks: int
) -> list[H] | None:
    """Return sequences that have `num_blocks` blocks together, in the order in which they give way. None where nobody can, or all
    have too few.

    Of those `below` the policy names the victims. Those `ahead` pause, the first one first."""
    lower = [*below]
    others = [seq for seq in ahead if seq not in lower]
    if not (lower or others) or sum(len(seq.block_ids) for seq in (*lower, *others)) < num_blocks:
        return None
    chosen: list[H] = []
    while num_blocks > 0 and (lower or others):
        victim = policy.victim(lower) if lower else others[0]
        (lower or others).remove(victim)
        num_blocks -= len(victim.block_ids)
        chosen.append(victim)
    return chosen

"""What an instance has to do, and what it has done so far, in numbers. Reports are made from it."""

from collections import Counter
from collections.abc import Sequence as SeqOf
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerLoad:
    """As of one instant. Several groups of ranks together have the sum of theirs. What only counts up is not compared."""

    num_used_blocks: int = 0
    num_available_blocks: int = 0
    """The number of unused blocks and of those that the prefix cache would give up."""
    num_running: int = 0
    num_decoding: int = 0
    """The number of running sequences whose prompt is computed."""
    num_waiting: int = 0
    num_context_tokens: int = 0
    """Known tokens of all running sequences."""
    num_late_tokens: int = 0
    """How many of the waiting tokens are of late prompts, which let others pass (`core.pacing.lateness`)."""
    pausable_blocks: int = 0
    """The blocks of sequences so far ahead of their pace that others may have them (`core.pacing.overcommit`)."""
    waiting_by_priority: tuple[tuple[int, int], ...] = ()
    """(priority, tokens to compute before all of it decodes) of each class that is here, the lowest first."""
    num_preempted: int = field(default=0, compare=False)
    num_returned: int = field(default=0, compare=False)
    """The number of preempted sequences whose KV was read back."""
    prefix_tokens: tuple[int, int] = field(default=(0, 0), compare=False)
    """(known tokens of the sequences that came, of these found in the prefix cache)."""
    draft_tokens: tuple[int, int] = field(default=(0, 0), compare=False)
    """The number of draft tokens that steps have computed, and of those that were right."""

    @property
    def num_waiting_tokens(self) -> int:
        """The number of tokens to compute before everything here decodes."""
        return sum(count for _, count in self.waiting_by_priority)


def total_load(loads: SeqOf[PlannerLoad]) -> PlannerLoad:
    waiting = Counter[int]()
    for load in loads:
        waiting.update(dict(load.waiting_by_priority))
    sums = {
        name: _sum([getattr(load, name) for load in loads])
        for name in (one.name for one in fields(PlannerLoad))
        if name != "waiting_by_priority"
    }
    return PlannerLoad(waiting_by_priority=tuple(sorted(waiting.items())), **sums)


def _sum(values: list[Any]) -> Any:
    """Return the sum of numbers, or of the numbers in each place of pairs."""
    return tuple(map(sum, zip(*values, strict=True))) if isinstance(values[0], tuple) else sum(values)

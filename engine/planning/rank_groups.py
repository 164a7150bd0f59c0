"""The groups of ranks of one instance: one, or with `dp` several, each with sequences, blocks and a prefix cache of its own.

A sequence belongs to one group from its admission or reservation to its end."""

from collections.abc import Sequence as SeqOf
from dataclasses import dataclass

from core.errors import Bug
from core.types import Request
from engine.planning.block_ledger import BlockLedger
from engine.planning.lifecycle import Lifecycle
from engine.planning.preemption import Preemption
from engine.planning.prefixes import Prefixes
from engine.planning.sequence import Sequence
from engine.planning.sequence_table import SequenceTable

_READ_COST = 1 / 16
"""What a token of context costs a group in each step, where a prompt's token that must be computed costs 1."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The parts that have one group's sequences and blocks."""

    table: SequenceTable
    ledger: BlockLedger
    lifecycle: Lifecycle
    preemption: Preemption
    prefixes: Prefixes


class RankGroups:
    def __init__(self, every: SeqOf[RankGroup]) -> None:
        self.every = every

    def find(self, key: str) -> tuple[RankGroup, Sequence] | None:
        """Return a sequence and its group, or None when it is not here any more."""
        for group in self.every:
            if (seq := group.table.all.get(key)) is not None:
                return group, seq
        return None

    def of(self, key: str) -> tuple[RankGroup, Sequence]:
        """As `find`, for a sequence that must be here."""
        if (found := self.find(key)) is None:
            raise Bug(f"{key} is asked for, which is not here")
        return found

    def check_fits(self, request: Request) -> None:
        """Raise RequestError for a request that could never be served here, or is here."""
        for group in self.every:
            group.table.check_fits(request)

    def by_cost(self, request: Request) -> SeqOf[RankGroup]:
        """Order the groups by what they have to do, this request included, since a step lasts as long as the busiest group
        computes. What a group has cached of the prompt need not be computed. Groups that cannot take the request now come
        last."""

        def cost(group: RankGroup) -> tuple[bool, float]:
            ledger, size = group.ledger, group.ledger.block_size
            missing = len(request.tokens) - group.prefixes.cached_prefix(request).num_usable * size
            to_do = missing + group.table.num_waiting_tokens + ledger.pool.num_used * size * _READ_COST
            return missing > ledger.num_available * size, to_do

        return sorted(self.every, key=cost) if len(self.every) > 1 else self.every

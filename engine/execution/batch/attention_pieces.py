"""What attention takes for a step's sequences: each as it is, or cut where tokens begin or end to attend to each other in both
directions.

A sequence's pieces are sequences of their own to it, with the blocks of the whole. The context of one that attends in both
directions ends where it does, so that its tokens see all of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from core.plan import SeqWork


@dataclass(frozen=True, slots=True)
class AttentionPieces:
    """One entry of each list for each piece."""

    query_lens: list[int]
    context_lens: list[int]
    tables: list[Tensor]
    both_ways: list[bool]

    @classmethod
    def of_decodes(cls, work: Sequence[SeqWork], tables: list[Tensor]) -> "AttentionPieces":
        """Return those of sequences that compute one token each."""
        return cls([1] * len(work), [item.start + 1 for item in work], tables, [])

    @classmethod
    def of(cls, work: Sequence[SeqWork], tables: list[Tensor]) -> "AttentionPieces":
        if not any(item.both_ways for item in work):
            return cls([item.count for item in work], [item.start + item.count for item in work], tables, [])
        pieces = [
            (end - start, end, table, both_ways)
            for item, table in zip(work, tables, strict=True)
            for start, end, both_ways in _cut(item)
            if start < end
        ]
        query_lens, context_lens, own_tables, ways = (list(each) for each in zip(*pieces, strict=True))
        return cls(query_lens, context_lens, own_tables, ways)


def _cut(item: SeqWork) -> Iterator[tuple[int, int, bool]]:
    """Yield (first token, end, whether its tokens see each other) of each piece; some are empty."""
    at = item.start
    for first, count in item.both_ways:
        yield at, first, False
        yield first, first + count, True
        at = first + count
    yield at, item.start + item.count, False

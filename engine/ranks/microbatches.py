"""Cuts a step's work into parts that follow each other through the stages of a pipeline.

While a stage computes one part, the stage before it computes the next. Every rank cuts alike, from the plan alone."""

from collections.abc import Sequence
from dataclasses import replace

from core.plan import SeqWork


def micro_batches(work: Sequence[SeqWork], num_parts: int) -> list[tuple[SeqWork, ...]]:
    """Cut the work into at most `num_parts` parts of about equal tokens, in order; none is empty.

    A prompt's chunk may be cut: its later tokens find the KV of the earlier ones, which have passed every stage before them.
    Only its last piece samples a token, and only that piece has the chunk's push. Drafts stay with the token that they follow,
    since all are verified together, and a chunk stays whole in which tokens attend to later ones."""
    total = sum(item.count for item in work)
    num_parts = min(num_parts, total)
    parts: list[list[SeqWork]] = [[] for _ in range(num_parts)]
    at = 0
    for item in work:
        done = 0
        while done < item.count:
            index = (at * num_parts) // total
            end = -(-(index + 1) * total // num_parts)
            is_whole = item.drafts or item.both_ways
            count = item.count if is_whole else min(item.count - done, end - at)
            parts[index].append(_piece(item, done, count))
            done, at = done + count, at + count
    return [tuple(part) for part in parts if part]


def _piece(item: SeqWork, done: int, count: int) -> SeqWork:
    last = done + count == item.count
    return replace(item, start=item.start + done, count=count, samples=item.samples and last)

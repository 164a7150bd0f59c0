"""Runs of a prompt's tokens that attend to each other in both directions, as those of an image may: no step computes a part of
one that is still missing.

So all KV of such a run was computed with the whole run in sight. What a cache has of it is valid, also where it ends within."""

from collections.abc import Iterable, Sequence

from core.prompt_images import PromptImage

Run = tuple[int, int]
"""(first token, number of tokens)"""


def missing_runs(images: Iterable[PromptImage], start: int) -> tuple[Run, ...]:
    """Return what is missing of such runs where the tokens from `start` on are, in order."""
    return tuple(
        (max(first, start), first + count - max(first, start))
        for image in images
        if image.both_ways
        for first, count in image.spans
        if first + count > start
    )


def uncut(runs: Sequence[Run], start: int, count: int, most: int) -> int:
    """Return how many tokens to compute from `start` on: `count`, or fewer where that would cut one of `runs`. One that begins at
    `start` is computed whole if it has at most `most` tokens; else nothing is."""
    for first, size in runs:
        if first < start + count < first + size:
            return first - start or (size if size <= most else 0)
    return count

"""Positions of a step's tokens where a model gives pictures' tokens positions in a plane (M-RoPE, arXiv:2409.12191).

A token has three positions: its step, its row and its column. Text has one number for all three. A picture's tokens have the
step that follows the text before it, and their rows and columns count from there; the text behind goes on after the longer side.
So positions depend on the prompt's pictures alone, wherever and in whatever pieces it is computed."""

from collections.abc import Sequence

import numpy as np

from core.plan import SeqWork
from core.prompt_pictures import Picture


def in_planes(
    positions: np.ndarray, work: Sequence[SeqWork], pictures: Sequence[Sequence[Picture]]
) -> np.ndarray:
    """Take (T,) int64: each token's position as if it were behind all pictures of its sequence. `pictures[i]` are those of which
    `work[i]` may compute something, or which follow. Return what they are, (T,) or (3, T)."""
    lie = [
        item.has_picture and any(one.columns for one in own) for item, own in zip(work, pictures, strict=True)
    ]
    if not any(lie):
        return positions
    out, at = np.stack([positions] * 3), 0
    for item, own, lies in zip(work, pictures, lie, strict=True):
        if lies:
            _put(out[:, at : at + item.count], item.start, own)
        at += item.count
    return out


def _put(out: np.ndarray, start: int, pictures: Sequence[Picture]) -> None:
    """Bring (3, count), the positions of one sequence's tokens from `start` on, from what they would be behind all of `pictures`
    to what they are, in place."""
    end = start + out.shape[1]
    for picture in pictures:
        out[:, : max(0, picture.end - start)] -= picture.position_shift
    for picture in pictures:
        (first, _), *_ = picture.spans
        low, high = max(first, start), min(picture.end, end)
        if picture.columns and low < high:
            into, own = np.arange(low, high) - first, out[:, low - start : high - start]
            own -= into  # all have its first token's
            own[1] += into // picture.columns
            own[2] += into % picture.columns

"""Positions of a step's tokens where a model gives images' tokens positions in a plane (M-RoPE, arXiv:2409.12191).

A token has three positions: its step, its row and its column. Text has one number for all three. An image's tokens have the
step that follows the text before it, and their rows and columns count from there; the text behind goes on after the longer side.
So positions depend on the prompt's images alone, wherever and in whatever pieces it is computed."""

from collections.abc import Sequence

import numpy as np

from core.plan import SeqWork
from core.prompt_images import PromptImage


def in_planes(
    positions: np.ndarray, work: Sequence[SeqWork], images: Sequence[Sequence[PromptImage]]
) -> np.ndarray:
    """Take (T,) int64: each token's position as if it were behind all images of its sequence. `images[i]` are those of which
    `work[i]` may compute something, or which follow. Return what they are, (T,) or (3, T)."""
    lie = [item.has_image and any(one.columns for one in own) for item, own in zip(work, images, strict=True)]
    if not any(lie):
        return positions
    out, at = np.stack([positions] * 3), 0
    for item, own, lies in zip(work, images, lie, strict=True):
        if lies:
            _put(out[:, at : at + item.count], item.start, own)
        at += item.count
    return out


def _put(out: np.ndarray, start: int, images: Sequence[PromptImage]) -> None:
    """Bring (3, count), the positions of one sequence's tokens from `start` on, from what they would be behind all of `images`
    to what they are, in place."""
    end = start + out.shape[1]
    for image in images:
        out[:, : max(0, image.end - start)] -= image.position_shift
    for image in images:
        (first, _), *_ = image.spans
        low, high = max(first, start), min(image.end, end)
        if image.columns and low < high:
            into, own = np.arange(low, high) - first, out[:, low - start : high - start]
            own -= into  # all have its first token's
            own[1] += into // image.columns
            own[2] += into % image.columns

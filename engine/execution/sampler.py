"""Draws the next tokens of a batch.

Order, per row: logit bias, allowed tokens, bad words, minimum-length mask, forced end of reasoning, repetition, presence and
frequency penalties, grammar unless an end is forced, then (unless greedy) temperature, top-k, top-p, min-p, and one uniform
number through the inverse of the cumulative distribution in token-id order. That number is a hash of (seed, output position)
alone: batch, chunking, worker and retry never matter. Log-probabilities are those of the raw logits.

What the rows ask for is worked out on the host and goes to the device in one piece. Nothing here waits for a device."""

import hashlib
import struct
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from core.plan import Sampled
from core.types import TokenId
from engine.execution.batch import History
from engine.execution.grammar_masks import RowMasks
from engine.execution.shaping import Penalising, Shaping
from engine.execution.step_memory import Pack, Placed, StepIO
from kernels.ops import Ops
from kernels.sampling import DrawShapes, Masks

_Logprobs = tuple[float | None, tuple[tuple[TokenId, float], ...]]
"""The log-probabilities of a token and of the likeliest ones, with their ids."""
_PACK = struct.Struct("<qq").pack


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on (seed, position) alone."""
    digest = hashlib.blake2b(_PACK(seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class RowDraws:
    """What the rows of a batch ask of their draws. `seqs[i]` holds the history of row i, and `masks` those of the rows with a
    grammar."""

    def __init__(self, seqs: Sequence[History], pack: Pack, masks: RowMasks | None = None) -> None:
        """Call `draw` when `pack` is sent."""
        self._masks = masks
        self._asking = [row for row, seq in enumerate(seqs) if seq.sampling.num_logprobs >= 0]
        self._asked = [seqs[row].sampling.num_logprobs for row in self._asking]
        self._asking_rows = _added(self._asking, pack)
        self._shaping = Shaping(seqs, pack, masks.complete if masks is not None else frozenset())
        self._allowed = _allowed(masks, self._shaping.forced_rows, pack)
        self._penalising = Penalising.of(seqs, pack)
        self._shapes = [seq.sampling for seq in seqs]
        self._columns = pack.add(_columns(seqs))

    def draw(self, logits: Tensor, ops: Ops, step: StepIO) -> list[Tensor]:
        """Draw one token for each row of `logits` (N, V) float32, which is overwritten. Returns tokens (N,) int64 and, where any
        row asks for them, `Ops.logprobs` of those that do."""
        raw = logits.index_select(0, self._asking_rows()) if self._asking_rows is not None else None
        self._shaping.shape(logits)
        if self._penalising is not None:
            ops.penalise(logits, self._penalising.penalties(step))
        masks = Masks(*(each() for each in self._allowed)) if self._allowed is not None else None
        tokens = ops.draw(logits, DrawShapes(self._shapes, self._columns()), masks)
        if raw is None or self._asking_rows is None:
            return [tokens]
        chosen = tokens.index_select(0, self._asking_rows())
        return [tokens, *ops.logprobs(raw, chosen, min(max(self._asked), raw.shape[1]))]

    def sampled(self, keys: Sequence[str], results: Sequence[Any]) -> list[Sampled]:
        """Return the rows' tokens, from what `draw` gave, each as a list."""
        ids: list[int] = results[0]
        known: dict[int, _Logprobs] = {}
        if self._asking:
            asked = zip(self._asking, self._asked, *results[1:], strict=True)
            for row, count, chosen, values, likely in asked:
                known[row] = chosen, tuple(zip(likely[:count], values[:count], strict=True))
        masks = self._masks
        return [
            Sampled(
                key,
                token,
                *known.get(row, (None, ())),
                run=masks.run_behind(row, token) if masks is not None else (),
            )
            for row, (key, token) in enumerate(zip(keys, ids, strict=True))
        ]


def _added(rows: Sequence[int], pack: Pack) -> Placed | None:
    return pack.add(np.array(rows)) if rows else None


def _allowed(masks: RowMasks | None, forced: Collection[int], pack: Pack) -> tuple[Placed, Placed] | None:
    """Add the masks of all rows but the `forced`, if there are any: (their rows, their bits)."""
    kept = [i for i, row in enumerate(masks.rows) if row not in forced] if masks is not None else []
    if masks is None or not kept:
        return None
    bits = masks.bits if len(kept) == len(masks.rows) else masks.bits[kept]
    return pack.add(np.array([masks.rows[i] for i in kept])), pack.add(bits)


def _columns(seqs: Sequence[History]) -> np.ndarray:
    """As `DrawShapes.columns`."""
    rows = [
        (
            seq.sampling.temperature,
            seq.sampling.top_k,
            seq.sampling.top_p,
            seq.sampling.min_p,
            uniform(seq.sampling.seed, seq.num_tokens - seq.num_prompt)
            if seq.sampling.temperature > 0
            else 0.0,
        )
        for seq in seqs
    ]
    return np.array(rows, np.float64).T.copy()

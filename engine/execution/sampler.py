"""Draws the next tokens of a batch.

Order, per row: logit bias, allowed tokens, bad words, minimum-length mask, grammar, forced end of reasoning, repetition,
presence and frequency penalties, then (unless greedy) temperature, top-k, top-p, min-p, and one uniform number through the
inverse of the cumulative distribution in token-id order. That number is a hash of (seed, output position) alone: batch,
chunking, worker and retry never matter. Log-probabilities are those of the raw logits.

What the rows ask for is worked out on the host and goes to the device in one piece. Nothing here waits for a device."""

import hashlib
import struct
from collections.abc import Sequence
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
from kernels.sampling import DrawShapes

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
        self._mask = (pack.add(np.array(masks.rows)), pack.add(masks.bits)) if masks is not None else None
        self._penalising = Penalising.of(seqs, pack)
        drawing = [row for row, seq in enumerate(seqs) if seq.sampling.temperature > 0]
        self._are_all_drawn = len(drawing) == len(seqs)
        self._drawing_rows = _added(drawing, pack)
        self._shapes = [seqs[row].sampling for row in drawing]
        self._columns = pack.add(_columns([seqs[row] for row in drawing])) if drawing else None

    def draw(self, logits: Tensor, ops: Ops, step: StepIO) -> list[Tensor]:
        """Draw one token for each row of `logits` (N, V) float32, which is overwritten. Returns tokens (N,) int64 and, where any
        row asks for them, `Ops.logprobs` of those that do."""
        raw = logits.index_select(0, self._asking_rows()) if self._asking_rows is not None else None
        self._shaping.shape(logits)
        if self._mask is not None:
            rows, bits = self._mask
            ops.mask(logits, rows(), bits())
        self._shaping.force(logits)
        if self._penalising is not None:
            ops.penalise(logits, self._penalising.penalties(step))
        tokens = self._drawn(logits, ops)
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

    def _drawn(self, logits: Tensor, ops: Ops) -> Tensor:
        if self._columns is None or self._drawing_rows is None:
            return ops.argmax(logits)
        draws = DrawShapes(self._shapes, self._columns())
        if self._are_all_drawn:
            return ops.draw(logits, draws)
        rows = self._drawing_rows()
        return ops.argmax(logits).index_copy_(0, rows, ops.draw(logits.index_select(0, rows), draws))


def _added(rows: Sequence[int], pack: Pack) -> Placed | None:
    return pack.add(np.array(rows)) if rows else None


def _columns(seqs: Sequence[History]) -> np.ndarray:
    """As `Draws.columns`."""
    rows = [
        (
            seq.sampling.temperature,
            seq.sampling.top_k,
            seq.sampling.top_p,
            seq.sampling.min_p,
            uniform(seq.sampling.seed, seq.num_tokens - seq.num_prompt),
        )
        for seq in seqs
    ]
    return np.array(rows, np.float64).T.copy()

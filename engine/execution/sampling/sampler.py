"""Samples the next tokens of a batch.

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

from core.plan import FailedSeq, Sampled
from core.types import TokenId
from engine.execution.batch.batch import History
from engine.execution.batch.step_memory import Pack, Placed, StepIO
from engine.execution.sampling.grammar_masks import RowMasks
from engine.execution.sampling.logit_processors import Penalising, RowsAsked, Shaping
from kernels.ops import Ops
from kernels.sampling import Masks, SampleShapes

_Logprobs = tuple[float | None, tuple[tuple[TokenId, float], ...]]
"""The log-probabilities of a token and of the likeliest ones, with their ids."""
_PACK = struct.Struct("<qq").pack


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on (seed, position) alone."""
    digest = hashlib.blake2b(_PACK(seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class RowSampling:
    """What the rows of a batch ask of their samples. `seqs[i]` holds the history of row i, unless `asked` reads none; and `masks`
    those of the rows with a grammar."""

    def __init__(
        self,
        seqs: Sequence[History],
        pack: Pack,
        masks: RowMasks | None = None,
        asked: RowsAsked | None = None,
    ) -> None:
        """Call `sample` when `pack` is sent. `asked` is worked out where nobody has it."""
        asked = asked or RowsAsked([seq.sampling for seq in seqs])
        self._masks, self._asked = masks, asked
        self._asking_rows = _added(asked.logprobs, pack)
        self._shaping: Shaping | None = None
        if asked.shaped or asked.thinking:
            self._shaping = Shaping(seqs, asked, pack, masks.complete if masks is not None else frozenset())
        forced = self._shaping.forced_rows if self._shaping is not None else ()
        self._allowed = _allowed(masks, forced, pack)
        self._penalising = Penalising.of(seqs, asked, pack)
        self._columns = pack.add(_columns(seqs, asked))

    def sample(self, logits: Tensor, ops: Ops, step: StepIO) -> list[Tensor]:
        """Sample one token for each row of `logits` (N, V) of floats, which may be overwritten. Returns tokens (N,) int64 and,
        where any row asks for them, `Ops.logprobs` of those that do."""
        if self._allowed is not None or not self._asked.only_likeliest:
            logits = logits.float()
        raw = logits.index_select(0, self._asking_rows()) if self._asking_rows is not None else None
        if self._shaping is not None:
            self._shaping.shape(logits)
        if self._penalising is not None:
            ops.penalise(logits, self._penalising.penalties(step))
        masks = Masks(*(each() for each in self._allowed)) if self._allowed is not None else None
        tokens = ops.sample(logits, SampleShapes(self._asked.samplings, self._columns()), masks)
        if raw is None or self._asking_rows is None:
            return [tokens]
        chosen = tokens.index_select(0, self._asking_rows())
        most = max(self._asked.samplings[row].num_logprobs for row in self._asked.logprobs)
        return [tokens, *ops.logprobs(raw, chosen, min(most, raw.shape[1]))]

    def dead_ends(self, keys: Sequence[str]) -> tuple[FailedSeq, ...]:
        """Return the rows' sequences whose grammars allow nothing more: what they sample is of no use."""
        found = self._masks.dead_ends if self._masks is not None else {}
        return tuple(FailedSeq(keys[row], reason) for row, reason in found.items())

    def sampled(self, keys: Sequence[str], results: Sequence[Any]) -> list[Sampled]:
        """Return the rows' tokens, from what `sample` gave, each as a list."""
        ids: list[int] = results[0]
        masks, asking = self._masks, self._asked.logprobs
        if masks is None and not asking:
            return [Sampled(key, token) for key, token in zip(keys, ids, strict=True)]
        known: dict[int, _Logprobs] = {}
        if asking:
            for row, chosen, values, likely in zip(asking, *results[1:], strict=True):
                count = self._asked.samplings[row].num_logprobs
                known[row] = chosen, tuple(zip(likely[:count], values[:count], strict=True))
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


def _columns(seqs: Sequence[History], asked: RowsAsked) -> np.ndarray:
    """As `SampleShapes.columns`. Nobody writes there."""
    if not asked.random:
        return asked.columns
    columns = asked.columns.copy()
    columns[4, asked.random] = [
        uniform(seq.sampling.seed or 0, seq.num_tokens - seq.num_prompt)
        for seq in (seqs[row] for row in asked.random)
    ]
    return columns

"""Draws the next tokens of a batch.

Order, per row: logit bias, allowed tokens, bad words, minimum-length mask, grammar, forced end of reasoning, repetition,
presence and frequency penalties, then (unless greedy) temperature, top-k, top-p, min-p, and one uniform number through the
inverse of the cumulative distribution in token-id order. That number is a hash of (seed, output position) alone: batch,
chunking, worker and retry never matter. Log-probabilities are those of the raw logits."""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch

from core.plan import Sampled
from core.types import SamplingParams, ThinkingBudget, TokenId
from engine.execution.batch import History
from engine.execution.grammar_masks import RowMasks
from engine.execution.thinking_budget import forced_token
from kernels.ops import Ops
from kernels.sampling import Draw, Penalties

_Logprobs = tuple[float, tuple[tuple[TokenId, float], ...]]
"""The log-probabilities of a token and of the likeliest ones, with their ids."""
_PACK = struct.Struct("<qq").pack


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on (seed, position) alone."""
    digest = hashlib.blake2b(_PACK(seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    keys: Sequence[str],
    seqs: Sequence[History],
    ops: Ops,
    masks: RowMasks | None = None,
) -> list[Sampled]:
    """Draw one token for each row of `logits` (N, V) float32, which is overwritten. `seqs[i]` holds the history of row i, and
    `masks` those of the rows with a grammar."""
    asking = [row for row, seq in enumerate(seqs) if seq.sampling.num_logprobs >= 0]
    raw = logits[asking] if asking else None
    complete = masks.complete if masks is not None else ()
    for row, seq in enumerate(seqs):
        if _is_shaped(seq.sampling):
            _shape(logits[row], seq, may_end=row in complete)
    if masks is not None:
        rows, bits = (torch.as_tensor(part, device=logits.device) for part in (masks.rows, masks.bits))
        ops.mask(logits, rows, bits)
    for row, seq in enumerate(seqs):
        if seq.sampling.thinking is not None:
            _end_reasoning(logits[row], seq, seq.sampling.thinking)
    if (penalties := _penalties(seqs)) is not None:
        ops.penalise(logits, penalties)
    tokens = logits.argmax(-1)
    drawn = [row for row, seq in enumerate(seqs) if seq.sampling.temperature > 0]
    if drawn:
        tokens[drawn] = ops.draw(logits[drawn], [_draw_of(seqs[row]) for row in drawn])
    known: dict[int, _Logprobs] = {}
    if raw is not None:
        asked = [seqs[row].sampling.num_logprobs for row in asking]
        known = dict(zip(asking, _logprobs(raw, tokens[asking], asked, ops), strict=True))
    ids: list[int] = tokens.tolist()
    found = [known.get(row, (None, ())) for row in range(len(ids))]
    runs = (
        [masks.run_behind(row, token) for row, token in enumerate(ids)]
        if masks is not None
        else [()] * len(ids)
    )
    return [
        Sampled(key, token, *more, run=run)
        for key, token, more, run in zip(keys, ids, found, runs, strict=True)
    ]


def _draw_of(seq: History) -> Draw:
    return Draw(seq.sampling, uniform(seq.sampling.seed, seq.num_tokens - seq.num_prompt))


def _logprobs(raw: torch.Tensor, tokens: torch.Tensor, asked: Sequence[int], ops: Ops) -> list[_Logprobs]:
    """Return, for each row of `raw`, the log-probability of its token and of as many of the likeliest as are `asked` for."""
    found = ops.logprobs(raw, tokens, min(max(asked), raw.shape[1]))
    return [
        (chosen, tuple(zip(ids[:count], values[:count], strict=True)))
        for count, chosen, values, ids in zip(asked, *(part.tolist() for part in found), strict=True)
    ]


def _is_shaped(sampling: SamplingParams) -> bool:
    return bool(
        sampling.logit_bias or sampling.min_tokens or sampling.allowed_token_ids or sampling.bad_words
    )


def _shape(row: torch.Tensor, seq: History, may_end: bool) -> None:
    """Apply bias, allowed and banned tokens and the minimum length, in place. An output that its grammar has completed `may_end`
    before its minimum."""
    sampling = seq.sampling
    for token, bias in sampling.logit_bias:
        row[token] += bias
    if sampling.allowed_token_ids:
        allowed = list(sampling.allowed_token_ids)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    if banned := _banned(sampling.bad_words, seq):
        row[banned] = -torch.inf
    num_output = seq.num_tokens - seq.num_prompt
    if num_output < sampling.min_tokens and sampling.masked_until_min and not may_end:
        row[list(sampling.masked_until_min)] = -torch.inf


def _banned(words: Sequence[tuple[TokenId, ...]], seq: History) -> list[TokenId]:
    """Return the tokens that would complete one of `words`."""
    known = seq.tokens[: seq.num_tokens]
    return [
        word[-1]
        for word in words
        if len(word) == 1
        or (len(word) <= len(known) + 1 and tuple(known[1 - len(word) :].tolist()) == word[:-1])
    ]


def _end_reasoning(row: torch.Tensor, seq: History, budget: ThinkingBudget) -> None:
    """Force the end of reasoning where its budget is spent, in place."""
    forced = forced_token(budget, seq.tokens[seq.num_prompt : seq.num_tokens])
    if forced is not None:
        row.fill_(-torch.inf)
        row[forced] = 0.0


def _penalties(seqs: Sequence[History]) -> Penalties | None:
    """Return the penalties, or None where no row is penalised."""
    entries: list[np.ndarray] = []
    for row, seq in enumerate(seqs):
        sampling, num_prompt = seq.sampling, seq.num_prompt
        if sampling.repetition_penalty != 1.0:
            tokens = np.unique(seq.tokens[: seq.num_tokens])
        elif sampling.presence_penalty or sampling.frequency_penalty:
            tokens = np.unique(seq.tokens[num_prompt : seq.num_tokens])
        else:
            continue
        output, counts = np.unique(seq.tokens[num_prompt : seq.num_tokens], return_counts=True)
        in_output = np.zeros(len(tokens), np.int64)
        in_output[np.searchsorted(tokens, output)] = counts
        entries.append(np.stack((np.full(len(tokens), row), tokens, in_output)))
    if not entries:
        return None
    factors = [
        (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        for s in (seq.sampling for seq in seqs)
    ]
    return Penalties(np.concatenate(entries, 1), np.array(factors, np.float32).T.copy())

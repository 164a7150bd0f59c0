"""Draws the next tokens of a batch.

Order, per row: logit bias, minimum-length mask, repetition, presence and frequency penalties, then (unless greedy)
temperature, top-k, top-p, min-p, and one uniform number through the inverse of the cumulative distribution in token-id
order. That number is a hash of (seed, output position) alone: batch, chunking, worker and retry never matter.
Log-probabilities are those of the raw logits."""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch

from core.plan import Sampled
from core.types import SamplingParams
from engine.batch import RankSeq

_PACK = struct.Struct("<qq").pack


def uniform(seed: int, position: int) -> float:
    """In [0, 1), from (seed, position) alone."""
    digest = hashlib.blake2b(_PACK(seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, keys: Sequence[str], seqs: Sequence[RankSeq]) -> list[Sampled]:
    """One token for each row of `logits` (N, V) float32, which is overwritten. `seqs[i]` holds the history of row i."""
    logprobs = _raw_logprobs(logits, seqs)
    for row, seq in enumerate(seqs):
        if _is_shaped(seq.sampling):
            _shape(logits[row], seq)
    tokens = logits.argmax(-1)
    drawn = [row for row, seq in enumerate(seqs) if seq.sampling.temperature > 0]
    if drawn:
        chosen = [seqs[row] for row in drawn]
        tokens[drawn] = _draw(distribution(logits[drawn], [seq.sampling for seq in chosen]), chosen)
    ids: list[int] = tokens.tolist()
    return [
        _sampled(key, token, row, logprobs, seqs[row].sampling)
        for row, (key, token) in enumerate(zip(keys, ids, strict=True))
    ]


def _raw_logprobs(logits: torch.Tensor, seqs: Sequence[RankSeq]) -> dict[int, torch.Tensor]:
    rows = [row for row, seq in enumerate(seqs) if seq.sampling.num_logprobs >= 0]
    if not rows:
        return {}
    return dict(zip(rows, torch.log_softmax(logits[rows], -1), strict=True))


def _sampled(
    key: str, token: int, row: int, logprobs: dict[int, torch.Tensor], sampling: SamplingParams
) -> Sampled:
    raw = logprobs.get(row)
    if raw is None:
        return Sampled(key, token)
    top: tuple[tuple[int, float], ...] = ()
    if sampling.num_logprobs > 0:
        values, ids = raw.topk(min(sampling.num_logprobs, raw.numel()))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(key, token, float(raw[token]), top)


def _is_shaped(sampling: SamplingParams) -> bool:
    return bool(
        sampling.logit_bias
        or sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _shape(row: torch.Tensor, seq: RankSeq) -> None:
    """Everything that changes logits by the sequence's own history, in place."""
    sampling = seq.sampling
    for token, bias in sampling.logit_bias:
        row[token] += bias
    num_output = seq.num_tokens - seq.num_prompt
    if num_output < sampling.min_tokens and sampling.masked_until_min:
        row[list(sampling.masked_until_min)] = -torch.inf
    history = seq.tokens[: seq.num_tokens]
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(history)).to(row.device)
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if (sampling.presence_penalty or sampling.frequency_penalty) and num_output:
        ids, counts = np.unique(history[seq.num_prompt :], return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * torch.from_numpy(counts).float()
        row[torch.from_numpy(ids).to(row.device)] -= penalty.to(row.device)


def distribution(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """(N, V) shaped logits of rows with temperature > 0 -> (N, V) probabilities, zero where a token may not be drawn.

    Rows that are cut by min-p or top-p need not add up to one."""
    device = logits.device
    temperature = torch.tensor([s.temperature for s in sampling], device=device)
    logits = logits / temperature[:, None]
    if any(s.top_k > 0 for s in sampling):
        logits = _top_k(logits, [s.top_k for s in sampling])
    probs = torch.softmax(logits, -1)
    if any(s.top_p < 1 for s in sampling):
        probs = _top_p(probs, torch.tensor([s.top_p for s in sampling], device=device))
    if any(s.min_p > 0 for s in sampling):
        floor = torch.tensor([s.min_p for s in sampling], device=device)[:, None] * probs.amax(
            -1, keepdim=True
        )
        probs = probs.masked_fill(probs < floor, 0.0)
    return probs


def _draw(probs: torch.Tensor, seqs: Sequence[RankSeq]) -> torch.Tensor:
    cumulative = probs.double().cumsum(-1)
    numbers = [uniform(seq.sampling.seed, seq.num_tokens - seq.num_prompt) for seq in seqs]
    targets = torch.tensor(numbers, dtype=torch.float64, device=probs.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=probs.shape[1] - 1)


def _top_k(logits: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    vocab = logits.shape[1]
    ks = torch.tensor([min(k, vocab) if k > 0 else vocab for k in top_k], device=logits.device)
    largest = logits.topk(int(min(vocab, max(k for k in top_k))), -1).values
    threshold = largest.gather(1, (ks.clamp(max=largest.shape[1]) - 1)[:, None])
    keep_all = (ks == vocab)[:, None]
    return logits.masked_fill((logits < threshold) & ~keep_all, -torch.inf)


def _top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the likeliest tokens up to and including the one that reaches `top_p`."""
    ordered, index = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (top_p < 1)[:, None], 0.0)
    return torch.zeros_like(probs).scatter_(1, index, ordered)

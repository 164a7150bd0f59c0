"""Sampling tokens in pure PyTorch: what may be sampled, and one number through the inverse of the cumulative distribution in
token-id order."""

from collections.abc import Sequence
from typing import Final

import torch

from kernels.sampling import Masks, Penalties, SampleShapes, Shape

_NUM_SORTED: Final = 1024
"""The likeliest tokens, among which top-p mostly ends."""


_ADDED = torch.where(torch.arange(256)[:, None] >> torch.arange(8) & 1 == 1, 0.0, -torch.inf)
"""(256, 8): what each bit of a byte, the lowest first, adds to its token's logit."""


def penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    """`Ops.penalise`."""
    rows, tokens, counts = penalties.entries[:, penalties.entries[0] >= 0].unbind(0)
    repetition, presence, frequency = penalties.factors[:, rows].unbind(0)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, tokens] = values - torch.where(counts > 0, presence + frequency * counts.float(), 0.0)


def mask(logits: torch.Tensor, masks: Masks) -> None:
    """Make what may not be sampled -inf, in place. Adding zeros and infinities takes a tenth of `masked_fill_`'s time."""
    added = _ADDED.to(logits.device)
    for row, words in zip(masks.rows.tolist(), masks.bits, strict=True):
        logits[row] += added.index_select(0, words.view(torch.uint8).int()).flatten()[: logits.shape[1]]


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Ops.logprobs`."""
    every = torch.log_softmax(logits, -1)
    top = every.topk(num_top, -1)
    return every.gather(1, tokens[:, None])[:, 0], top.values, top.indices


def sample(logits: torch.Tensor, asked: SampleShapes, masks: Masks | None = None) -> torch.Tensor:
    """`Ops.sample`."""
    if masks is not None:
        mask(logits, masks)
    sampled = [row for row, shape in enumerate(asked.shapes) if shape.temperature > 0]
    if len(sampled) == len(logits):
        return _sampled(logits, asked.shapes, asked.uniforms)
    tokens = logits.argmax(-1)
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        shapes = [asked.shapes[row] for row in sampled]
        tokens[rows] = _sampled(logits.index_select(0, rows), shapes, asked.uniforms.index_select(0, rows))
    return tokens


def _sampled(logits: torch.Tensor, shapes: Sequence[Shape], uniforms: torch.Tensor) -> torch.Tensor:
    cumulative = distribution(logits, shapes).double().cumsum(-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def distribution(logits: torch.Tensor, shapes: Sequence[Shape]) -> torch.Tensor:
    """(N, V) shaped logits of rows with temperature > 0 -> (N, V) probabilities, zero where a token may not be sampled.

    Rows that are cut by min-p or top-p need not add up to one."""
    device = logits.device
    temperature = torch.tensor([s.temperature for s in shapes], device=device)
    logits = logits / temperature[:, None]
    if any(s.top_k > 0 for s in shapes):
        logits = _top_k(logits, [s.top_k for s in shapes])
    probs = torch.softmax(logits, -1)
    if any(s.top_p < 1 for s in shapes):
        probs = _top_p(probs, torch.tensor([s.top_p for s in shapes], device=device))
    if any(s.min_p > 0 for s in shapes):
        floor = torch.tensor([s.min_p for s in shapes], device=device)[:, None] * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < floor, 0.0)
    return probs


def _top_k(logits: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    vocab = logits.shape[1]
    ks = torch.tensor([min(k, vocab) if k > 0 else vocab for k in top_k], device=logits.device)
    largest = logits.topk(int(min(vocab, max(k for k in top_k))), -1).values
    threshold = largest.gather(1, (ks.clamp(max=largest.shape[1]) - 1)[:, None])
    keep_all = (ks == vocab)[:, None]
    return logits.masked_fill((logits < threshold) & ~keep_all, -torch.inf)


def _top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the likeliest tokens up to and including the one that reaches `top_p`; of equal ones those with smaller ids.

    Sorting a whole vocabulary costs more than a small model's step, and the tokens that are kept are few: only those at least as
    likely as the `_NUM_SORTED`-th are sorted, where they reach `top_p`."""
    if probs.shape[1] <= _NUM_SORTED:
        return _cut(probs, top_p)
    smallest = probs.topk(_NUM_SORTED, -1).values[:, -1]
    kept = torch.empty_like(probs)
    for row, (own, share, least) in enumerate(zip(probs, top_p, smallest, strict=True)):
        if share >= 1:
            kept[row] = own
            continue
        index = torch.nonzero(own >= least)[:, 0]
        likely = own[index]
        if likely.sum() < share:
            kept[row] = _cut(own[None], share[None])[0]
        else:
            kept[row] = torch.zeros_like(own).scatter_(0, index, _cut(likely[None], share[None])[0])
    return kept


def _cut(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    ordered, index = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (top_p < 1)[:, None], 0.0)
    return torch.zeros_like(probs).scatter_(1, index, ordered)

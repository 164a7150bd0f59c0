"""Mixture of experts in pure PyTorch: choosing experts, and computing those that a rank holds."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import ExpertWeights
from kernels.packed import ExpertWeight, PrepackedExperts, as_float, one_of
from kernels.routing import Routing

_TINY = 1e-20
"""Added to sums that are divided by, since sigmoid scores can all be next to nothing."""


Top = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(scores (..., E), k) -> the k largest of each row, descending, and which they are; both (..., k)."""


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found = scores.topk(k, -1)
    return found.values, found.indices


def top_stable(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest scores; of equal ones the first."""
    found = scores.sort(dim=-1, descending=True, stable=True)
    return found.values[..., :k], found.indices[..., :k]


def route(
    logits: Tensor, choice_bias: Tensor | None, routing: Routing, top: Top = top
) -> tuple[Tensor, Tensor]:
    scores = scores_of(logits, routing)
    choice = scores if choice_bias is None else scores + choice_bias
    if routing.top_groups < routing.num_groups:
        choice = _within_best_groups(choice, routing, top)
    experts = top(choice, routing.top_k)[1]
    return experts, weights_of(scores, experts, routing)


def scores_of(logits: Tensor, routing: Routing) -> Tensor:
    """(T, E) -> (T, E)."""
    match routing.scoring:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrtsoftplus":
            return F.softplus(logits).sqrt()


def weights_of(scores: Tensor, experts: Tensor, routing: Routing) -> Tensor:
    """(T, E), (T, K) -> (T, K): by what each token's experts are weighed."""
    weights = scores.gather(-1, experts)
    if routing.renormalise:
        weights = weights / _sum_last(weights)[..., None].clamp_min(_TINY)
    return weights * routing.scale


def _within_best_groups(choice: Tensor, routing: Routing, top: Top) -> Tensor:
    grouped = choice.unflatten(-1, (routing.num_groups, -1))
    worth = _sum_last(top(grouped, routing.group_best)[0])
    best = top(worth, routing.top_groups)[1]
    closed = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, value=False)
    return grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)


def _sum_last(x: Tensor) -> Tensor:
    """Sum over the last dimension, which is short, in order, however many rows there are."""
    return reduce(torch.add, x.unbind(-1))


def experts(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    held: ExpertWeights,
    activate: Callable[[Tensor], Tensor],
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
) -> Tensor:
    """Sort (row, slot) pairs by slot and multiply each run at once. Sums are in float32, in the order of the slots."""
    flat, width = slots.flatten(), slots.shape[-1]
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=held.down.shape[0] + 1).tolist()
    rows, scales = order // width, weights.flatten()[order, None]
    out = torch.zeros(len(x), held.down.shape[1], dtype=torch.float32, device=x.device)
    start = counts[0]
    for slot, count in enumerate(counts[1:]):
        if not count:
            continue
        run = slice(start, start + count)
        bias = None if held.gate_up_bias is None else held.gate_up_bias[slot]
        inner = activate(_multiply(x[rows[run]], held.gate_up, slot, bias, linear))
        out.index_add_(0, rows[run], _multiply(inner, held.down, slot, None, linear).float() * scales[run])
        start += count
    return out.to(x.dtype)


def _multiply(
    x: Tensor,
    weight: ExpertWeight,
    slot: int,
    bias: Tensor | None,
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    if isinstance(weight, PrepackedExperts):
        return weight.product(weight.data[slot], x, bias)
    return linear(x, as_float(one_of(weight, slot), x.dtype), bias)

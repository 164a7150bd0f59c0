"""Mixture of experts in pure PyTorch: choosing experts, and computing those that a rank holds."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import ExpertWeights
from kernels.routing import Routing

_TINY = 1e-20
"""Sigmoid scores can all be next to nothing."""


def route(logits: Tensor, choice_bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if choice_bias is None else scores + choice_bias
    if routing.top_groups < routing.num_groups:
        choice = _within_best_groups(choice, routing)
    experts = choice.topk(routing.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if routing.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(_TINY)
    return experts, weights * routing.scale


def _within_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    grouped = choice.unflatten(-1, (routing.num_groups, -1))
    worth = grouped.topk(routing.group_best, -1).values.sum(-1)
    best = worth.topk(routing.top_groups, -1).indices
    closed = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)


def experts(
    x: Tensor, slots: Tensor, weights: Tensor, held: ExpertWeights, activate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sorts (row, slot) pairs by slot and multiplies each run at once. Sums are in float32, in the order of the slots."""
    flat, width = slots.flatten(), slots.shape[-1]
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=len(held.down) + 1).tolist()
    rows, scales = order // width, weights.flatten()[order, None]
    out = torch.zeros(len(x), held.down.shape[1], dtype=torch.float32, device=x.device)
    start = counts[0]
    for slot, count in enumerate(counts[1:]):
        if not count:
            continue
        run = slice(start, start + count)
        bias = None if held.gate_up_bias is None else held.gate_up_bias[slot]
        inner = activate(F.linear(x[rows[run]], held.gate_up[slot], bias))
        out.index_add_(0, rows[run], F.linear(inner, held.down[slot]).float() * scales[run])
        start += count
    return out.to(x.dtype)

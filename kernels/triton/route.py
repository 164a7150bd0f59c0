"""A router's choice of experts for each token in one launch: scores, groups, the best experts, their weights.

Memory-bound, and small: floor: (T, E) is read once. The best are found one after the other, of equal ones the first, so that a
row's choice has nothing to do with other rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.routing import Routing
from kernels.triton.launching import launchable
from kernels.triton.platform import next_power_of_2


@triton.jit
def _best(values, place, COUNT: tl.constexpr):
    """Return the largest of (COUNT,) values, and the first place that has it. Where all are NaN, any place."""
    peak = tl.max(values, 0)
    return peak, tl.min(tl.where(values == peak, place, COUNT - 1), 0)


@triton.jit
def _within_best_groups(
    choice, column, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """Return `choice` with no expert outside of the TOP_GROUPS groups of SIZE whose GROUP_BEST best are best together."""
    group, each = column // SIZE, tl.arange(0, BLOCK_G)
    worth = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        inside = tl.where(group == number, choice, float("-inf"))
        total = tl.full((), 0.0, tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            peak, place = _best(inside, column, BLOCK)
            total += peak
            inside = tl.where(column == place, float("-inf"), inside)
        worth = tl.where(each == number, total, worth)
    is_open = column < 0
    for _ in tl.static_range(TOP_GROUPS):
        _peak, place = _best(worth, each, BLOCK_G)
        is_open = is_open | (group == place)
        worth = tl.where(each == place, float("-inf"), worth)
    return tl.where(is_open, choice, float("-inf"))


@launchable()
def _route_kernel(
    logits, bias, experts, weights, scale, stride,
    E: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column, slot = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    exists = column < E
    x = tl.load(logits + row * stride + column, exists, float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(x)
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + column, exists, 0.0)
    choice = tl.where(exists, choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        choice = _within_best_groups(
            choice, column, E // GROUPS, BLOCK, GROUPS, BLOCK_G, TOP_GROUPS, GROUP_BEST
        )
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    found = tl.zeros((BLOCK_K,), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for number in tl.static_range(TOP_K):
        _peak, place = _best(choice, column, BLOCK)
        weight = tl.sum(tl.where(column == place, scores, 0.0), 0)
        total += weight
        chosen = tl.where(slot == number, tl.minimum(place, E - 1), chosen)
        found = tl.where(slot == number, weight, found)
        choice = tl.where(column == place, float("-inf"), choice)
    if RENORMALISE:
        found = found / tl.maximum(total, 1e-20)
    tl.store(experts + row * TOP_K + slot, chosen.to(tl.int64), slot < TOP_K)
    tl.store(weights + row * TOP_K + slot, found * scale, slot < TOP_K)


def route(logits: Tensor, choice_bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """`Ops.route`; rows of logits are contiguous."""
    num_rows, num_experts = logits.shape
    assert logits.stride(1) == 1
    experts = torch.empty((num_rows, routing.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty(experts.shape, dtype=torch.float32, device=logits.device)
    if num_rows:
        _route_kernel[(num_rows,)](
            logits, choice_bias, experts, weights, routing.scale, logits.stride(0),
            E=num_experts, BLOCK=next_power_of_2(num_experts), TOP_K=routing.top_k,
            BLOCK_K=next_power_of_2(routing.top_k), SIGMOID=routing.scoring == "sigmoid",
            RENORMALISE=routing.renormalise, GROUPS=routing.num_groups,
            BLOCK_G=next_power_of_2(routing.num_groups), TOP_GROUPS=routing.top_groups,
            GROUP_BEST=routing.group_best, num_warps=1 if num_experts <= 128 else 2,
        )  # fmt: skip
    return experts, weights

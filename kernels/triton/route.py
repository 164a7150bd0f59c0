"""A router's choice of experts for each token in one launch: scores, groups, the best experts, their weights.

Memory-bound, and small: floor: (T, E) is read once. The best are found one after the other, of equal ones the first, so that a
row's choice has nothing to do with other rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.routing import Routing
from kernels.triton.launching import launchable
from kernels.triton.platform import cdiv, next_power_of_2

_ROWS = 4


@triton.jit
def _first(values, peak, column, BLOCK: tl.constexpr):
    """Return the first of the columns of each row that has the row's peak."""
    return tl.min(tl.where(values == peak[:, None], column, BLOCK - 1), 1)[:, None]


@triton.jit
def _within_best_groups(
    choice, column, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """Return `choice` with no expert outside of the TOP_GROUPS groups of SIZE whose GROUP_BEST best are best together."""
    group = column // SIZE
    worth = tl.full(choice.shape, float("-inf"), tl.float32)
    for number in tl.static_range(GROUPS):
        inside = tl.where(group == number, choice, float("-inf"))
        peak = tl.max(inside, 1)
        total = peak
        for _ in tl.static_range(GROUP_BEST - 1):
            inside = tl.where(column == _first(inside, peak, column, BLOCK), float("-inf"), inside)
            peak = tl.max(inside, 1)
            total += peak
        worth = tl.where(group == number, total[:, None], worth)
    is_open = column < 0
    for _ in tl.static_range(TOP_GROUPS):
        found = group == _first(worth, tl.max(worth, 1), column, BLOCK) // SIZE
        is_open = is_open | found
        worth = tl.where(found, float("-inf"), worth)
    return tl.where(is_open, choice, float("-inf"))


@launchable(do_not_specialize=["num_rows"])
def _route_kernel(
    logits, bias, experts, weights, scale, num_rows, stride,
    E: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """ROWS rows, each a warp's."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    exists = (row < num_rows) & (column < E)
    x = tl.where(row < num_rows, tl.load(logits + row * stride + column, exists, float("-inf")), 0.0)
    if SCORING == "sigmoid":
        scores = tl.sigmoid(x)
    elif SCORING == "sqrtsoftplus":
        scores = tl.sqrt(tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    else:
        scores = tl.exp(x - tl.max(x, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    choice = scores
    if bias is not None:
        choice += tl.load(bias + column, column < E, 0.0)
    choice = tl.where(exists, choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        choice = _within_best_groups(choice, column, E // GROUPS, BLOCK, GROUPS, TOP_GROUPS, GROUP_BEST)
    choice = tl.where(choice == choice, choice, float("-inf"))
    slot = tl.full(choice.shape, -1, tl.int32)
    for number in tl.static_range(TOP_K):
        is_best = (choice == tl.max(choice, 1)[:, None]) & (slot < 0)
        place = tl.min(tl.where(is_best, column, BLOCK - 1), 1)[:, None]
        slot = tl.where(column == place, number, slot)
        choice = tl.where(column == place, float("-inf"), choice)
    is_chosen = slot >= 0
    if RENORMALISE:
        total = tl.sum(tl.where(is_chosen, scores, 0.0), 1)
        scores = scores / tl.maximum(total, 1e-20)[:, None]
    there = row * TOP_K + slot
    tl.store(experts + there, (column + tl.zeros_like(slot)).to(tl.int64), is_chosen & exists)
    tl.store(weights + there, scores * scale, is_chosen & exists)


def route(logits: Tensor, choice_bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """`Ops.route`; rows of logits are contiguous."""
    num_rows, num_experts = logits.shape
    assert logits.stride(1) == 1
    experts = torch.empty((num_rows, routing.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty(experts.shape, dtype=torch.float32, device=logits.device)
    if num_rows:
        _route_kernel[(cdiv(num_rows, _ROWS),)](
            logits, choice_bias, experts, weights, routing.scale, num_rows, logits.stride(0),
            E=num_experts, BLOCK=next_power_of_2(num_experts), ROWS=_ROWS, TOP_K=routing.top_k,
            SCORING=routing.scoring, RENORMALISE=routing.renormalise, GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups, GROUP_BEST=routing.group_best, num_warps=_ROWS,
        )  # fmt: skip
    return experts, weights

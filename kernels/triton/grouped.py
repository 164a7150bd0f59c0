"""Products of rows with the matrix of each row's group: experts of a mixture, adapters of a batch.

Rows are sorted by group, each group's run is cut into tiles, and programs find theirs by counting those of all groups; nothing of
that leaves the device. Floor: each group's matrix that has a row is read once, or 2 flops for each row and element of it."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launching import launchable
from kernels.triton.platform import INTERPRETED, cdiv, dot_dtype, next_power_of_2


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Pairs of a row and its group, sorted by group, behind the places of those of group -1, which have no order."""

    order: Tensor
    """(P,) int64: pairs, as they were, in their order here."""
    starts: Tensor
    """(G + 1,) int64: where each group's pairs begin here."""
    block_m: int
    max_tiles: int


def group_rows(groups: Tensor, num_groups: int, block_m: int = 0, most: int = 128) -> Groups:
    """`groups` (P,) int64: of each pair, -1 for none. `block_m`: rows of a tile, 0: as they are on average of a group, `most` at
    most."""
    num_pairs = groups.numel()
    average = cdiv(num_pairs, num_groups)
    block_m = 16 if INTERPRETED else block_m or min(most, max(16, next_power_of_2(average)))
    order = torch.empty_like(groups)
    starts = torch.empty(num_groups + 1, dtype=torch.int64, device=groups.device)
    block = 1024 if num_pairs <= 1024 else 4096
    _sort_kernel[(num_groups,)](groups, order, starts, num_pairs, BLOCK=block, num_warps=4)
    max_tiles = min(num_pairs, num_groups + num_pairs // block_m)
    return Groups(order=order, starts=starts, block_m=block_m, max_tiles=max_tiles)


@launchable(do_not_specialize=["num_pairs"])
def _sort_kernel(groups, order, starts, num_pairs, BLOCK: tl.constexpr):
    """Program (group): finds its pairs' places by counting those of groups before it."""
    group = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, num_pairs, BLOCK):
        pair = first + each
        before += (tl.load(groups + pair, pair < num_pairs, group) < group).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + group, place)
    for first in tl.range(0, num_pairs, BLOCK):
        pair = first + each
        own = (tl.load(groups + pair, pair < num_pairs, -1) == group).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - 1, pair, own > 0)
        place += tl.sum(own, 0)
    if group == tl.num_programs(0) - 1:
        tl.store(starts + group + 1, place)


@triton.jit
def group_of(tile, starts, num_groups, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr):
    """A tile's group, `num_groups` or more for tiles behind the last, and how many tiles the groups before it have."""
    each = tl.arange(0, BLOCK_G)
    held = each < num_groups
    count = tl.load(starts + each + 1, held, 0) - tl.load(starts + each, held, 0)
    ends = tl.cumsum(((count + BLOCK_M - 1) // BLOCK_M).to(tl.int32), 0)
    group = tl.sum((ends <= tile).to(tl.int32), 0)
    return group, tl.sum(tl.where(each == group - 1, ends, 0), 0)


@triton.jit
def rows_of_tile(index, group, starts, order, BLOCK_M: tl.constexpr):
    """Return, for the `index`-th tile of a group, its rows' places in the order, which pairs they are, and which of them
    exist."""
    place = tl.load(starts + group) + index * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = place < tl.load(starts + group + 1)
    return place, tl.load(order + place, exists, 0), exists


@launchable()
def _grouped_kernel(
    x, weight, bias, out, order, starts, num_groups, N, K, width, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (columns, tile). Rows of x: GATHER: pair // width, else the pair's place in the order. Rows of out: SCATTER: the
    pair, else its place."""
    tile = tl.program_id(1)
    group, before = group_of(tile, starts, num_groups, BLOCK_M, BLOCK_G)
    if group < num_groups:
        place, pair, exists = rows_of_tile(tile - before, group, starts, order, BLOCK_M)
        source = pair // width if GATHER else place
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        inside = column < N
        left = x + source[:, None] * x_stride + inner[None, :]
        right = weight + group.to(tl.int64) * weight_stride + column[None, :] * K + inner[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            there = inner < K - k
            a = tl.load(left + k, exists[:, None] & there[None, :], 0.0).to(DOT)
            b = tl.load(right + k, inside[None, :] & there[:, None], 0.0).to(DOT)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        if BIAS:
            acc += tl.load(bias + group * N + column, inside, 0.0).to(tl.float32)[None, :]
        row = pair if SCATTER else place
        target = out + row[:, None] * N + column[None, :]
        mask = exists[:, None] & inside[None, :]
        if ADD:
            acc += tl.load(target, mask, 0.0).to(tl.float32)
        tl.store(target, acc.to(out.dtype.element_ty), mask)


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, out: Tensor, *,
    width: int = 0, scatter: bool = False, add: bool = False,
) -> None:  # fmt: skip
    """`x` times each pair's (N, K) of weight (G, N, K), contiguous, into `out` (P, N), to what is there if `add`.

    `width` > 0: pair p's row of x (R, K) is p // width; else x (P, K) is in the groups' order. `scatter`: so is out, or in the
    pairs' own. Rows of pairs without a group are not written."""
    _, size, inner = weight.shape
    assert weight.is_contiguous()
    assert out.is_contiguous()
    if not groups.max_tiles:
        return
    small = groups.block_m <= 32
    block_n = min(next_power_of_2(size), 32 if INTERPRETED else 64 if small else 128)
    block_k = min(next_power_of_2(inner), 32 if INTERPRETED else 128 if small else 64)
    _grouped_kernel[(cdiv(size, block_n), groups.max_tiles)](
        x, weight, bias, out, groups.order, groups.starts, weight.shape[0], size, inner, width or 1,
        x.stride(0), weight.stride(0), BLOCK_M=groups.block_m, BLOCK_N=max(16, block_n), BLOCK_K=max(16, block_k),
        BLOCK_G=next_power_of_2(weight.shape[0]), GATHER=width > 0, SCATTER=scatter, BIAS=bias is not None,
        ADD=add, DOT=dot_dtype(x.dtype), num_warps=4 if small else 8, num_stages=4 if small else 3,
    )  # fmt: skip


@launchable()
def _combine_kernel(pairs, slots, weights, out, N, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(WIDTH):
        pair = row * WIDTH + choice
        exists = (column < N) & (tl.load(slots + pair) >= 0)
        acc += tl.load(pairs + pair * N + column, exists, 0.0).to(tl.float32) * tl.load(weights + pair)
    tl.store(out + row * N + column, acc.to(out.dtype.element_ty), column < N)


def combine(pairs: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """`pairs` (T K, N), slots and weights (T, K), contiguous -> (T, N): each row's weighted sum in float32, in the order of its
    slots, of which those of -1 are left out."""
    num_rows, width = slots.shape
    out = pairs.new_empty((num_rows, pairs.shape[1]))
    if num_rows:
        block = min(1024, next_power_of_2(pairs.shape[1]))
        _combine_kernel[(num_rows, cdiv(pairs.shape[1], block))](
            pairs, slots, weights, out, pairs.shape[1], WIDTH=width, BLOCK=block, num_warps=4
        )
    return out


def add_lora(out: Tensor, x: Tensor, shrink: Tensor, expand: Tensor, adapters: Tensor) -> None:
    """`out` (T, N), contiguous, += expand[a] @ shrink[a] @ x for each row's adapter a; shrink (A, r, K), expand (A, N, r),
    adapters (T,) int64, -1 for none. A scaling belongs into `expand`."""
    groups = group_rows(adapters, shrink.shape[0])
    narrow = x.new_empty((len(x), shrink.shape[1]))
    grouped_linear(x, shrink, None, groups, narrow, width=1)
    grouped_linear(narrow, expand, None, groups, out, scatter=True, add=True)

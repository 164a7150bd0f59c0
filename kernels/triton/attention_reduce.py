"""The second half of attention over split contexts: partial results of one row are weighed by their sums and added, in an order
that the splits' numbers say. Memory-bound; floor: the partial results are read once, float32."""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from kernels.triton.launching import await_inputs, launchable
from kernels.triton.platform import cdiv, next_power_of_2, num_programs
from kernels.triton.softmax import with_sink
from kernels.triton.tiles import Items, rows_of

_SPLITS = 8
"""Splits that are read at once,"""
_MANY_SPLITS = 64
"""and where so few rows are reduced that their programs wait for memory alone. Not where bits must not depend on the batch."""
_ROWS = 4
"""Rows of one program, where they are many."""


@dataclass(frozen=True, slots=True)
class Partials:
    """Unnormalised results of (item, head block, row): an item is a split of a tile's context, and a tile's follow each other."""

    values: Tensor
    """(..., D) float32"""
    stats: Tensor
    """(..., 2) float32: the largest score, and the sum relative to it."""

    @classmethod
    def empty(
        cls, num_items: int, head_blocks: int, rows: int, size: int, device: torch.device
    ) -> "Partials":
        shape = (num_items, head_blocks, rows)
        return cls(
            torch.empty((*shape, size), dtype=torch.float32, device=device),
            torch.empty((*shape, 2), dtype=torch.float32, device=device),
        )


@launchable(overlaps=True)
def _reduce_kernel(
    partial, partial_stats, sinks, out, split_tiles,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (tile, head block, ROWS of the tile). Results are added SPLITS at a time, those whose parts' numbers have the same
    quotient by SPLITS: in the same order whichever is the first."""
    await_inputs()
    at, head_block = split_tiles + tl.program_id(0) * 5, tl.program_id(1)
    first, num_splits, number = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    first_row, count = tl.load(at + 3), tl.load(at + 4)
    first_of_tile = tl.program_id(2) * ROWS
    if (num_splits == 0) | (first_of_tile >= count * HEADS):
        return
    row = first_of_tile + tl.arange(0, ROWS)
    token, head, exists = rows_of(count, head_block, GROUP, HEADS, row, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(-(number % SPLITS), num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        there = ((split >= 0) & (split < num_splits))[:, None] & exists[None, :]
        result = (first + split).to(tl.int64) * tl.num_programs(1) + head_block
        place = (result * BLOCK_M)[:, None] + row[None, :]
        peak = tl.load(partial_stats + place * 2, there, float("-inf"))
        part = tl.load(partial_stats + place * 2 + 1, there, 0.0)
        values = tl.load(
            partial + (place * D)[:, :, None] + column[None, None, :],
            there[:, :, None] & (column < D)[None, None, :],
            0.0,
        )
        now = tl.maximum(largest, tl.max(peak, 0))
        shift = tl.where(now == float("-inf"), 0.0, now)
        old, new = tl.exp2(largest - shift), tl.exp2(peak - shift[None, :])
        acc = acc * old[:, None] + tl.sum(values * new[:, :, None], 0)
        total = total * old + tl.sum(part * new, 0)
        largest = now
    factor, total = with_sink(largest, total, sinks, head, exists, SINKS)
    target = ((first_row + token).to(tl.int64) * (KV_HEADS * GROUP) + head) * D
    tl.store(
        out + target[:, None] + column[None, :],
        (acc * (factor / total)[:, None]).to(out.dtype.element_ty),
        exists[:, None] & (column < D)[None, :],
    )


def reduce_splits(
    partials: Partials, items: Items, sinks: Tensor | None, out: Tensor, num_kv_heads: int, heads: int, *, invariant: bool
) -> None:  # fmt: skip
    """Fills the rows of `out` (T, H, D) that belong to split tiles; `heads`: of one tile."""
    _, head_blocks, block_m, size = partials.values.shape
    num_tiles, num_rows, block_d = len(items.split_tiles), items.most_tokens * heads, next_power_of_2(size)
    if not num_tiles:
        return
    few = not invariant and num_tiles * head_blocks * num_rows <= num_programs(out.device, 4)
    rows, splits = (1, _MANY_SPLITS) if few else (_ROWS, _SPLITS)
    _reduce_kernel[(num_tiles, head_blocks, cdiv(num_rows, rows))](
        partials.values, partials.stats, sinks, out, items.split_tiles,
        KV_HEADS=num_kv_heads, GROUP=out.shape[1] // num_kv_heads, HEADS=heads, D=size, BLOCK_D=block_d,
        BLOCK_M=block_m, ROWS=rows, SPLITS=splits, SINKS=sinks is not None,
        num_warps=max(1, rows * splits * block_d // 2048),
    )  # fmt: skip

"""The second half of attention over split contexts: partial results of one row are weighed by their sums and added, in an order
that the splits' numbers say. Memory-bound; floor: the partial results are read once, float32."""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from kernels.triton.launching import await_inputs, launchable
from kernels.triton.platform import next_power_of_2, num_programs
from kernels.triton.softmax import with_sink
from kernels.triton.tiles import Items, Tiles, rows_of

_SPLITS = 8
"""Splits that are read at once,"""
_MANY_SPLITS = 64
"""and where so few rows are reduced that their programs wait for memory alone. Not where bits must not depend on the batch."""


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


@launchable(overlaps=True, do_not_specialize=["num_splits"])
def _reduce_kernel(
    partial, partial_stats, sinks, out, tile_seqs, tile_tokens, starts, query_lens, items, seq_ends, num_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (tile, head block, row). Its items: `num_splits`, as all have, or up to its end in `seq_ends`. They are added
    SPLITS at a time, those whose numbers have the same quotient by SPLITS: in the same order whichever is the first."""
    await_inputs()
    tile, head_block, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    item, skipped, first, query_len, first_row = tile * num_splits, 0, 0, 1, tile
    if seq_ends is not None:
        item = tl.load(seq_ends + tile - 1, tile > 0, 0)
        num_splits = tl.load(seq_ends + tile) - item
        skipped = tl.load(items + item * 4 + 1) % SPLITS
    else:
        seq, first = tl.load(tile_seqs + tile), tl.load(tile_tokens + tile)
        query_len, first_row = tl.load(query_lens + seq), tl.load(starts + seq)
    token, head, exists = rows_of(first, query_len, head_block, GROUP, HEADS, row, BLOCK_M)
    if not exists:
        return
    column = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    largest, total = float("-inf"), 0.0
    for start in tl.range(-skipped, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        there = (split >= 0) & (split < num_splits)
        at = ((item + split).to(tl.int64) * tl.num_programs(1) + head_block) * BLOCK_M + row
        peak = tl.load(partial_stats + at * 2, there, float("-inf"))
        part = tl.load(partial_stats + at * 2 + 1, there, 0.0)
        values = tl.load(
            partial + at[:, None] * D + column[None, :], there[:, None] & (column < D)[None, :], 0.0
        )
        now = tl.maximum(largest, tl.max(peak, 0))
        shift = tl.where(now == float("-inf"), 0.0, now)
        old, new = tl.exp2(largest - shift), tl.exp2(peak - shift)
        acc = acc * old + tl.sum(values * new[:, None], 0)
        total = total * old + tl.sum(part * new, 0)
        largest = now
    factor, total = with_sink(largest, total, sinks, head, exists, SINKS)
    target = (first_row + token).to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(out + target * D + column, (acc * (factor / total)).to(out.dtype.element_ty), column < D)


def reduce_splits(
    partials: Partials, tiles: Tiles, items: Items | None, sinks: Tensor | None, out: Tensor, num_kv_heads: int, heads: int,
    *, invariant: bool,
) -> None:  # fmt: skip
    """Fills the rows of `out` (T, H, D) that belong to `tiles`; `heads`: of one tile."""
    num_items, head_blocks, block_m, size = partials.values.shape
    block_d, num_rows = next_power_of_2(size), tiles.most_tokens * heads
    few = not invariant and tiles.num_tiles * head_blocks * num_rows <= num_programs(out.device, 4)
    splits = _MANY_SPLITS if few else _SPLITS
    _reduce_kernel[(tiles.num_tiles, head_blocks, num_rows)](
        partials.values, partials.stats, sinks, out, tiles.tile_seqs, tiles.tile_tokens, tiles.starts, tiles.query_lens,
        items and items.splits, items and items.seq_ends, num_items // tiles.num_tiles,
        KV_HEADS=num_kv_heads, GROUP=out.shape[1] // num_kv_heads, HEADS=heads, D=size, BLOCK_D=block_d,
        BLOCK_M=block_m, SPLITS=splits, SINKS=sinks is not None, num_warps=max(1, splits * block_d // 2048),
    )  # fmt: skip

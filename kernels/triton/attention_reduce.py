"""The second half of attention over split contexts: partial results of one row are weighed by their sums and added, in the order
of the splits. Memory-bound; floor: the partial results are read once, float32."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launching import launchable
from kernels.triton.softmax import with_sink
from kernels.triton.tiles import Items, Tiles, rows_of


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


@launchable(do_not_specialize=["num_splits"])
def _reduce_kernel(
    partial, partial_stats, sinks, out, tile_seqs, tile_tokens, starts, query_lens, tile_ends, num_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (tile, head block, ROWS of its rows). Its items: `num_splits`, as all have, or up to its end in `tile_ends`."""
    tile, head_block = tl.program_id(0), tl.program_id(1)
    seq, first = tl.load(tile_seqs + tile), tl.load(tile_tokens + tile)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    token, head, exists = rows_of(first, tl.load(query_lens + seq), head_block, GROUP, HEADS, row, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (column < D)[None, :]
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    item = tile * num_splits
    if tile_ends is not None:
        item = tl.load(tile_ends + tile - 1, tile > 0, 0)
        num_splits = tl.load(tile_ends + tile) - item
    base = (item.to(tl.int64) * tl.num_programs(1) + head_block) * BLOCK_M + row
    for split in tl.range(0, num_splits):
        at = base + split * tl.num_programs(1) * BLOCK_M
        peak = tl.load(partial_stats + at * 2, exists, float("-inf"))
        part = tl.load(partial_stats + at * 2 + 1, exists, 0.0)
        values = tl.load(partial + at[:, None] * D + column[None, :], mask, 0.0)
        now = tl.maximum(largest, peak)
        shift = tl.where(now == float("-inf"), 0.0, now)
        old, new = tl.exp2(largest - shift), tl.exp2(peak - shift)
        acc = acc * old[:, None] + values * new[:, None]
        total = total * old + part * new
        largest = now
    factor, total = with_sink(largest, total, sinks, head, exists, SINKS)
    target = (tl.load(starts + seq) + token).to(tl.int64)[:, None] * (KV_HEADS * GROUP) + head[:, None]
    acc = acc * (factor / total)[:, None]
    tl.store(out + target * D + column[None, :], acc.to(out.dtype.element_ty), mask)


def reduce_splits(
    partials: Partials, tiles: Tiles, items: Items | None, sinks: Tensor | None, out: Tensor, num_kv_heads: int, heads: int
) -> None:  # fmt: skip
    """Fills the rows of `out` (T, H, D) that belong to `tiles`; `heads`: of one tile."""
    num_items, head_blocks, block_m, size = partials.values.shape
    rows = min(block_m, 16)
    _reduce_kernel[(tiles.num_tiles, head_blocks, block_m // rows)](
        partials.values, partials.stats, sinks, out, tiles.tile_seqs, tiles.tile_tokens, tiles.starts, tiles.query_lens,
        items and items.tile_ends, num_items // tiles.num_tiles,
        KV_HEADS=num_kv_heads, GROUP=out.shape[1] // num_kv_heads, HEADS=heads, D=size,
        BLOCK_D=triton.next_power_of_2(size), BLOCK_M=block_m, ROWS=rows, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip

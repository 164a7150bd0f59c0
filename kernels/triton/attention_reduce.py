"""The second half of attention over split contexts: partial results of one row are weighed by their sums and added, in the order
of the splits. Memory-bound; floor: the partial results are read once, float32."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.softmax import with_sink
from kernels.triton.tiles import Tiles, rows_of


@dataclass(frozen=True, slots=True)
class Partials:
    """Unnormalised results of (tile, head block, split, row)."""

    values: Tensor
    """(..., D) float32"""
    stats: Tensor
    """(..., 2) float32: the largest score, and the sum relative to it."""

    @classmethod
    def empty(
        cls, num_tiles: int, head_blocks: int, splits: int, rows: int, size: int, device: torch.device
    ) -> "Partials":
        shape = (num_tiles, head_blocks, splits, rows)
        return cls(
            torch.empty((*shape, size), dtype=torch.float32, device=device),
            torch.empty((*shape, 2), dtype=torch.float32, device=device),
        )


@triton.jit(do_not_specialize=["num_splits"])
def _reduce_kernel(
    partial, partial_stats, sinks, out, tile_seqs, tile_tokens, starts, query_lens, num_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (tile, head block, ROWS of its rows)."""
    tile, head_block = tl.program_id(0), tl.program_id(1)
    seq, first = tl.load(tile_seqs + tile), tl.load(tile_tokens + tile)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    token, head, exists = rows_of(first, tl.load(query_lens + seq), head_block, GROUP, HEADS, row, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (column < D)[None, :]
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    base = (tile * tl.num_programs(1) + head_block).to(tl.int64) * num_splits * BLOCK_M
    for split in tl.range(0, num_splits):
        at = base + split * BLOCK_M + row
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
    partials: Partials, tiles: Tiles, sinks: Tensor | None, out: Tensor, num_kv_heads: int, heads: int
) -> None:
    """Fills the rows of `out` (T, H, D) that belong to `tiles`; `heads`: of one tile."""
    num_tiles, head_blocks, num_splits, block_m, size = partials.values.shape
    rows = min(block_m, 16)
    _reduce_kernel[(num_tiles, head_blocks, block_m // rows)](
        partials.values, partials.stats, sinks, out, tiles.tile_seqs, tiles.tile_tokens, tiles.starts, tiles.query_lens,
        num_splits, KV_HEADS=num_kv_heads, GROUP=out.shape[1] // num_kv_heads, HEADS=heads, D=size,
        BLOCK_D=triton.next_power_of_2(size), BLOCK_M=block_m, ROWS=rows, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip

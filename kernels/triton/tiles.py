"""A step cut into tiles of query rows for attention: some query tokens of one sequence times some of the heads that share a
KV head. Cut on the host once a step, uploaded in one piece, and read back in the kernels by `rows_of`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import AttentionMeta
from kernels.triton.platform import cdiv

_ALIGNED = 4
"""int32 in 16 bytes, the alignment that Triton asks arguments for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Tiles of some of a step's sequences, those that attend to most first: the last ones to end are short."""

    tile_seqs: Tensor
    """(num_tiles,) int32, as all of these: sequence of each tile,"""
    tile_tokens: Tensor
    """and its first query token, counted from the sequence's first."""
    starts: Tensor
    """(B,) first row of each sequence in the packed step."""
    query_lens: Tensor
    context_lens: Tensor
    table: Tensor
    """(B, widest) block ids."""
    longest: int
    """Tokens that a tile attends to, at most."""
    most_tokens: int
    """Query tokens of a tile, at most."""
    both_ways: Tensor | None = None
    """(B,) 1 where all queries see all of the context, those that follow them, too; None: none does."""

    @property
    def num_tiles(self) -> int:
        return self.tile_seqs.shape[0]


@dataclass(frozen=True, slots=True)
class Items:
    """Splits of sequences of one query token, read by kernels that are launched alike whatever the lengths: int32 tensors whose
    sizes do not change."""

    splits: Tensor
    """(most items, 4) of each its sequence, -1 for those that this step does not have; its number within the sequence; its first
    token, and the one behind its last. A program reads them at once: each load that waits for another one costs what a short
    context's keys and values do."""
    seq_ends: Tensor
    """(num_seqs,) items of each sequence and of those before it."""


def cut(
    meta: AttentionMeta, seqs: Sequence[int], tokens_per_tile: int, window: int, block_size: int, device: torch.device
) -> Tiles:  # fmt: skip
    """`seqs`: which of the step's sequences, at least one."""
    queries, contexts = np.array(meta.query_lens, np.int32), np.array(meta.context_lens, np.int32)
    both = np.array(meta.both_ways, np.int32)
    own = np.array(seqs, np.int32)
    num_tiles = -(-queries[own] // tokens_per_tile)
    tile_seq = np.repeat(own, num_tiles)
    token = (
        np.arange(len(tile_seq)) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)
    ) * tokens_per_tile
    query, context = queries[tile_seq], contexts[tile_seq]
    last = context - query + np.minimum(token + tokens_per_tile, query)
    end = np.where(both[tile_seq] > 0, context, last) if len(both) else last
    spans = np.minimum(end, window + tokens_per_tile - 1 + end - last) if window else end
    order = np.argsort(-spans, kind="stable")
    table = _table(meta, block_size)
    parts = [
        tile_seq[order],
        token[order].astype(np.int32),
        np.array(meta.query_starts[:-1], np.int32),
        queries,
        contexts,
        both,
        table.ravel(),
    ]
    tile_seqs, tile_tokens, starts, query_lens, context_lens, both_ways, flat = _uploaded(parts, device)
    return Tiles(
        tile_seqs=tile_seqs,
        tile_tokens=tile_tokens,
        starts=starts,
        query_lens=query_lens,
        context_lens=context_lens,
        table=flat.view(table.shape),
        longest=int(spans.max()),
        most_tokens=min(tokens_per_tile, int(queries[own].max())),
        both_ways=both_ways if meta.both_ways else None,
    )


def _table(meta: AttentionMeta, block_size: int) -> np.ndarray:
    """Return (B, widest) block ids, which are those of all cuts of the step."""
    key = ("block table", block_size)
    if (table := meta.cache.get(key)) is None:
        widest = max(-(-context // block_size) for context in meta.context_lens)
        table = meta.cache[key] = np.zeros((len(meta.block_tables), widest), np.int32)
        for row, ids in zip(table, meta.block_tables, strict=True):
            known = ids.numpy()[:widest]
            row[: len(known)] = known
    return table


def _uploaded(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Bring int32 arrays to the device in one piece, each to a place of the same alignment whatever the lengths: kernels are
    compiled for their arguments' alignment, which would take seconds in the middle of serving."""
    ends = np.cumsum([_aligned(len(part)) for part in parts]).tolist()
    packed = np.zeros(ends[-1], np.int32)
    starts = [end - _aligned(len(part)) for part, end in zip(parts, ends, strict=True)]
    for part, start in zip(parts, starts, strict=True):
        packed[start : start + len(part)] = part
    uploaded = torch.from_numpy(packed).to(device, non_blocking=True)
    return [uploaded[start : start + len(part)] for part, start in zip(parts, starts, strict=True)]


def _aligned(count: int) -> int:
    """Return how many int32 to keep for `count` of them, so that what is behind them is aligned as they are."""
    return cdiv(count, _ALIGNED) * _ALIGNED


@triton.jit
def work_of(
    tile_seqs, tile_tokens, starts, query_lens, context_lens, both_ways, items, split_tokens,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr,
    FIXED: tl.constexpr, ABSOLUTE: tl.constexpr,
):  # fmt: skip
    """This program's block of heads and number of results; the sequence, its first query token, its row of the step and lengths;
    of its tokens the first, the first that not all rows see, and the end. FIXED: program (head block, item), the sequence -1
    where there is no item: those begin last. Else program (head block, tile, split): heads that share a
    KV head run together, for they read the same."""
    if FIXED:
        head_block, item = tl.program_id(0), tl.program_id(1)
        result = item.to(tl.int64) * tl.num_programs(0) + head_block
        seq, first, query_len = tl.load(items + item * 4), 0, 1
        begin, end = tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
        context_len, seen_by_all = tl.load(context_lens + seq, seq >= 0, 0), end
        row = seq
    else:
        head_block, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        result = (tile * tl.num_programs(2) + split).to(tl.int64) * tl.num_programs(0) + head_block
        seq, first = tl.load(tile_seqs + tile), tl.load(tile_tokens + tile)
        query_len, context_len, row = (
            tl.load(query_lens + seq),
            tl.load(context_lens + seq),
            tl.load(starts + seq),
        )
        position = context_len - query_len + first
        seen_by_all = position + 1
        end = min(position + BLOCK_M // HEADS, context_len)
        if both_ways is not None:
            end = tl.where(tl.load(both_ways + seq) != 0, context_len, end)
        begin = 0
        if WINDOW > 0:
            begin = max(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        if SPLIT:
            base = 0 if ABSOLUTE else begin
            end = min(end, base + (split + 1) * split_tokens)
            begin = max(begin, base + split * split_tokens)
    edge = begin
    if WINDOW == 0 and not ABSOLUTE:
        edge = max(begin, begin + (min(seen_by_all, end) - begin) // BLOCK_N * BLOCK_N)
    return head_block, result, seq, first, row, query_len, context_len, begin, edge, end


@triton.jit
def rows_of(
    first, query_len, head_block, GROUP: tl.constexpr, HEADS: tl.constexpr, row, BLOCK_M: tl.constexpr
):
    """BLOCK_M rows of a tile are its tokens, and within each token HEADS heads: one block of the GROUP that share a KV head.

    For some of the rows -> token of the sequence's queries, head, and whether there are such."""
    blocks_per_group: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    token = first + row // HEADS
    in_group = head_block % blocks_per_group * HEADS + row % HEADS
    head = head_block // blocks_per_group * GROUP + in_group
    exists = (row < BLOCK_M // HEADS * HEADS) & (token < query_len) & (in_group < GROUP)
    return token, head, exists

"""What the programs of one launch of attention do: items, each of them a tile of queries over a part of what these see.

A tile is some query tokens of one sequence times some of the heads that share a KV head. One whose part is all that it sees
writes its result; those of a tile that is split are reduced. Cut on the host once a step, read back in the kernels by
`item_of`, `result_of` and `rows_of`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.platform import cdiv

ITEM_FIELDS, SPLIT_TILE_FIELDS = 8, 5
_ALIGNED = 4
"""int32 in 16 bytes, the alignment that Triton asks arguments for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A launch's. Tensors are int32; their rows may be fewer than there is room for."""

    items: Tensor
    """(items, 8), of each: the row of the table that has its sequence's blocks, -1 for no item; the first token that it is over,
    and the one behind its last; the step's row of its first query, how many queries there are, and the position of the first;
    the place of its result, -1 where it is no part; whether queries see those behind them. A program reads them at once: each
    load that waits for another one costs what a short context's keys and values do."""
    split_tiles: Tensor
    """(split tiles, 5), of each: the place of its first part's result, behind which those of the others are; how many parts there
    are, 0 for no tile; the number of the first, counted from the context's beginning; the step's row of its first query, and how
    many queries there are."""
    table: Tensor
    """(sequences, widest) block ids."""
    num_places: int
    """Results of parts."""
    most_tokens: int
    """Query tokens of a tile, at most."""


@dataclass(frozen=True, slots=True)
class StepLens:
    """A step's sequences as the host knows them: (B,) int32 each."""

    queries: np.ndarray
    contexts: np.ndarray
    """Tokens in the cache once the step's own are written. 0 for queries that see nothing: their results are zeros."""
    starts: np.ndarray
    """First row of each in the packed step."""
    both_ways: np.ndarray
    """1 where all queries see all of the context, those that follow them, too."""

    @classmethod
    def of(
        cls, queries: Sequence[int], contexts: Sequence[int], both_ways: Sequence[bool] = ()
    ) -> "StepLens":
        lens = np.array(queries, np.int32)
        both = np.array(both_ways, np.int32) if both_ways else np.zeros_like(lens)
        return cls(lens, np.array(contexts, np.int32), lens.cumsum(dtype=np.int32) - lens, both)


@dataclass(frozen=True, slots=True)
class Tiles:
    """(tiles,) int32 each. Those of sequences that have several begin with what sees most: the last ones to end are short."""

    seqs: np.ndarray
    rows: np.ndarray
    """The step's row of the first query."""
    counts: np.ndarray
    """How many queries there are."""
    positions: np.ndarray
    """The first query's."""
    begins: np.ndarray
    ends: np.ndarray
    """What is seen."""
    both_ways: np.ndarray

    def __len__(self) -> int:
        return len(self.seqs)


@dataclass(frozen=True, slots=True)
class Splits:
    """How each tile is split: (tiles,) int32 each, but for the last."""

    bases: np.ndarray
    """The token at which parts begin to be counted,"""
    firsts: np.ndarray
    """the number of the first one that the tile has,"""
    counts: np.ndarray
    """how many it has, at least one,"""
    tokens: np.ndarray
    """and how long they are."""
    all_reduced: bool
    """Whether results are reduced where there is but one part, too."""

    @property
    def are_reduced(self) -> np.ndarray:
        return np.ones(len(self.counts), bool) if self.all_reduced else self.counts > 1


def cut(lens: StepLens, seqs: np.ndarray, tokens_per_tile: int, window: int, block_n: int) -> Tiles:
    """`seqs`: which of the step's sequences. What a tile sees begins at a multiple of `block_n`."""
    queries, tokens = lens.queries[seqs], 0
    are_cut = len(seqs) > 0 and queries.max() > tokens_per_tile
    if are_cut:
        num_tiles = -(-queries // tokens_per_tile)
        firsts = num_tiles.cumsum(dtype=np.int32) - num_tiles
        tokens = (np.arange(num_tiles.sum(), dtype=np.int32) - firsts.repeat(num_tiles)) * tokens_per_tile
        seqs, queries = seqs.repeat(num_tiles), queries.repeat(num_tiles)
    contexts, both = lens.contexts[seqs], lens.both_ways[seqs]
    counts = np.minimum(queries - tokens, tokens_per_tile)
    positions = contexts - queries + tokens
    ends = np.where(both, contexts, np.maximum(positions + counts, 0))
    begins = (
        np.maximum(positions - (window - 1), 0) // block_n * block_n if window else np.zeros_like(positions)
    )
    fields = seqs, lens.starts[seqs] + tokens, counts, positions, begins, ends, both
    if are_cut:
        order = np.argsort(begins - ends, kind="stable")
        fields = tuple(field[order] for field in fields)
    return Tiles(*fields)


def items_of(tiles: Tiles, splits: Splits) -> tuple[np.ndarray, np.ndarray]:
    """Return `Items.items` and `Items.split_tiles`."""
    counts, ends = splits.counts, splits.counts.cumsum(dtype=np.int32)
    num_items = int(ends[-1]) if len(ends) else 0
    items = np.empty((num_items, ITEM_FIELDS), np.int32)
    if num_items == len(tiles) and not splits.all_reduced:
        for column, field in enumerate(
            (tiles.seqs, tiles.begins, tiles.ends, tiles.rows, tiles.counts, tiles.positions)
        ):
            items[:, column] = field
        items[:, 6], items[:, 7] = -1, tiles.both_ways
        return items, np.empty((0, SPLIT_TILE_FIELDS), np.int32)
    tile = np.arange(len(tiles), dtype=np.int32).repeat(counts)
    number = np.arange(num_items, dtype=np.int32) - (ends - counts - splits.firsts)[tile]
    tokens = splits.tokens[tile]
    begins = splits.bases[tile] + number * tokens
    items[:, 0] = tiles.seqs[tile]
    items[:, 1] = np.maximum(begins, tiles.begins[tile])
    items[:, 2] = np.minimum(begins + tokens, tiles.ends[tile])
    items[:, 3], items[:, 4], items[:, 5] = tiles.rows[tile], tiles.counts[tile], tiles.positions[tile]
    items[:, 7] = tiles.both_ways[tile]
    reduced = np.flatnonzero(splits.are_reduced)
    is_part = splits.are_reduced[tile]
    items[:, 6] = np.where(is_part, is_part.cumsum() - 1, -1)
    split_tiles = np.empty((len(reduced), SPLIT_TILE_FIELDS), np.int32)
    parts = counts[reduced]
    split_tiles[:, 0], split_tiles[:, 1] = parts.cumsum() - parts, parts
    split_tiles[:, 2], split_tiles[:, 3] = splits.firsts[reduced], tiles.rows[reduced]
    split_tiles[:, 4] = tiles.counts[reduced]
    return items, split_tiles


def uploaded(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Bring int32 arrays to the device in one piece, each to a place of the same alignment whatever the lengths: kernels are
    compiled for their arguments' alignment, which would take seconds in the middle of serving."""
    ends = np.cumsum([aligned(part.size) for part in parts]).tolist()
    starts = [0, *ends[:-1]]
    packed = np.empty(ends[-1], np.int32)
    for part, start in zip(parts, starts, strict=True):
        packed[start : start + part.size] = part.ravel()
    sent = torch.from_numpy(packed).to(device, non_blocking=True)
    return [
        sent[start : start + part.size].view(part.shape) for part, start in zip(parts, starts, strict=True)
    ]


def aligned(count: int) -> int:
    """Return how many int32 to keep for `count` of them, so that what is behind them is aligned as they are."""
    return cdiv(count, _ALIGNED) * _ALIGNED


@triton.jit
def item_of(items, BLOCK_N: tl.constexpr, ONE_SPAN: tl.constexpr):
    """Program (head block, item) -> head block; the row of its sequence in the table, -1 where there is no item; of its tokens
    the first, the first that not all rows see (ONE_SPAN: the first), and the end; its first row, number of queries and first
    position; whether queries see those behind."""
    head_block, at = tl.program_id(0), items + tl.program_id(1) * 8
    seq, begin, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    row, count, position, both_ways = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 7)
    edge = begin
    if not ONE_SPAN:
        edge = max(begin, begin + (min(position + 1, end) - begin) // BLOCK_N * BLOCK_N)
    return head_block, seq, begin, edge, end, row, count, position, both_ways


@triton.jit
def result_of(items):
    """Program (head block, item) -> its first row and number of queries, as `item_of`, and the int64 number of its result,
    negative where it is no part. Read behind the loop over tokens, where registers are free: within it some GPUs have none to
    keep them in."""
    at = items + tl.program_id(1) * 8
    row, count, place = (
        tl.load(at + 3, volatile=True),
        tl.load(at + 4, volatile=True),
        tl.load(at + 6, volatile=True),
    )
    return row, count, place.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def rows_of(count, head_block, GROUP: tl.constexpr, HEADS: tl.constexpr, row, BLOCK_M: tl.constexpr):
    """BLOCK_M rows of a tile are its tokens, and within each token HEADS heads: one block of the GROUP that share a KV head.

    For some of the rows -> token of the tile's `count`, head, and whether there are such."""
    blocks_per_group: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    token = row // HEADS
    in_group = head_block % blocks_per_group * HEADS + row % HEADS
    head = head_block // blocks_per_group * GROUP + in_group
    exists = (row < BLOCK_M // HEADS * HEADS) & (token < count) & (in_group < GROUP)
    return token, head, exists

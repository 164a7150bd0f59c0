"""Decode steps whose kernels are launched alike whatever the lengths: `Ops.fixed_decode`.

Attention's programs take items from a table of fixed length, each a split of one sequence's context; those without an item end at
once. Of S sequences with x tokens each there are at most S + sum(x) / split of them. So splits are as long as it takes for all to
have places in the table; or, where they end at fixed places so that bits are the same in any batch, the table is as long as it
takes for all tokens of the pool."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionMeta
from kernels.triton.attention_config import (
    DECODE_ROWS,
    FIXED,
    INVARIANT_ROWS,
    PROGRAMS_PER_PROCESSOR,
    AttentionConfig,
    AttentionShape,
    ContextPart,
    config_for,
    smallest_split,
)
from kernels.triton.platform import cdiv, num_programs
from kernels.triton.tiles import Items, Tiles

Splits = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""(num_seqs,) int32 each: the token at which a sequence's splits begin to be counted, the first of them that it has, how many it
has, and tokens of one."""
_Split = Callable[[np.ndarray, np.ndarray], Splits]
"""(num_seqs,) int32 tokens of each context, and the first ones that are seen -> splits."""


class TritonFixedDecode:
    """`FixedDecode`."""

    def __init__(
        self,
        num_seqs: int,
        max_blocks: int,
        empty_block: int,
        block_size: int,
        device: torch.device,
        split_tokens: int = 0,
        *,
        larger: "TritonFixedDecode | None" = None,
    ) -> None:
        """`split_tokens` > 0: contexts are split at its multiples, as by `attention.TritonAttention`. There are places for all
        tokens of the pool, which are more than those of all contexts unless sequences share many. Tables are those of
        `larger`."""
        self._num_seqs, self._empty_block, self._device = num_seqs, empty_block, device
        self._block_size = block_size
        self._split_tokens, self._most_splits = split_tokens, 0
        if split_tokens:
            longest = cdiv(max_blocks * block_size, split_tokens)
            self._most_splits = min(num_seqs * longest, num_seqs + empty_block * block_size // split_tokens)
        self._empty_slot = empty_block * block_size
        self._lens = np.ones(num_seqs, np.int32)
        self._table = (
            np.zeros((num_seqs, max_blocks), np.int32) if larger is None else larger._table[:num_seqs]
        )
        self._table_rows: list[np.ndarray | None] = (
            [None] * num_seqs if larger is None else larger._table_rows
        )
        """What each row of `_table` begins with. A sequence's row stays as it is until it has more blocks."""
        self._plans: dict[tuple[AttentionShape, int], _Plan] = {}
        each = torch.arange(num_seqs, dtype=torch.int32, device=device)
        none, ones = torch.zeros_like(each), torch.ones_like(each)
        if larger is None:
            table = torch.zeros((num_seqs, max_blocks), dtype=torch.int32, device=device)
        else:
            table = larger._tiles.table[:num_seqs]
        self._tiles = Tiles(
            tile_seqs=each,
            tile_tokens=none,
            starts=each,
            query_lens=ones,
            context_lens=ones.clone(),
            table=table,
            longest=0,
            most_tokens=1,
        )
        slots, counted = torch.zeros((2, num_seqs), dtype=torch.int64, device=device).unbind(0)
        lens, starts = (1,) * num_seqs, tuple(range(num_seqs + 1))
        self.meta = AttentionMeta(
            query_starts=starts,
            query_lens=lens,
            context_lens=lens,
            block_tables=(),
            slots=slots,
            cache={FIXED: self},
            counted=counted,
            is_fixed=True,
        )
        self.fill([torch.from_numpy(each).to(device) for each in self.inputs((), (), ())])

    def smaller(self, num_seqs: int) -> "TritonFixedDecode":
        max_blocks, split_tokens = self._table.shape[1], self._split_tokens
        return TritonFixedDecode(
            num_seqs, max_blocks, self._empty_block, self._block_size, self._device, split_tokens, larger=self
        )

    def fits(self, context_lens: Iterable[int]) -> bool:
        if not self._split_tokens:
            return True
        further = sum(cdiv(length, self._split_tokens) - 1 for length in context_lens)
        return self._num_seqs + further <= self._most_splits

    def inputs(
        self, context_lens: Sequence[int], block_tables: Sequence[np.ndarray], slots: Sequence[int]
    ) -> list[np.ndarray]:
        num = len(context_lens)
        for row, ids in enumerate(block_tables):
            if ids is not self._table_rows[row]:
                self._table[row, : len(ids)] = ids
                self._table_rows[row] = ids
        self._table[num:, 0] = self._empty_block
        self._table_rows[num : self._num_seqs] = [None] * (self._num_seqs - num)
        table = self._table[:, : max(map(len, block_tables), default=1)]
        self._lens[:num], self._lens[num:] = context_lens, 1
        rows = np.full((2, self._num_seqs), self._empty_slot, np.int64)
        rows[0, :num], rows[1] = slots, np.arange(self._num_seqs) < num
        return [table, self._lens, *rows, *(plan.items(self._lens) for plan in self._plans.values())]

    def fill(self, inputs: Sequence[Tensor]) -> None:
        assert self.meta.counted is not None
        table = self._tiles.table[:, : inputs[0].shape[1]]
        fixed = (table, self._tiles.context_lens, self.meta.slots, self.meta.counted)
        for target, values in zip(
            (*fixed, *(plan.memory for plan in self._plans.values())), inputs, strict=True
        ):
            target.copy_(values)

    def part(self, shape: AttentionShape, window: int) -> ContextPart:
        """Return the part of all layers of that shape and window. It is made when the first asks for it, and filled from then
        on."""
        key = (shape, window)
        if (plan := self._plans.get(key)) is None:
            assert shape.split_tokens == self._split_tokens
            plan = self._plans[key] = self._plan(shape, window)
            plan.memory.copy_(torch.from_numpy(plan.items(self._lens)))
        return plan.part

    def _plan(self, shape: AttentionShape, window: int) -> "_Plan":
        if tokens := self._split_tokens:
            config, most = config_for(shape, INVARIANT_ROWS, self._device), self._most_splits
            return _Plan.make(
                config,
                self._tiles,
                most,
                window,
                lambda lens, begins: split_at_multiples(lens, begins, tokens),
            )
        config = config_for(shape, DECODE_ROWS, self._device)
        most = most_items(self._num_seqs, config, shape, self._device)
        return _Plan.make(
            config, self._tiles, most, window, lambda lens, begins: split_all(lens, begins, most, config)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    part: ContextPart
    window: int
    split: _Split
    memory: Tensor
    """The int32 memory that all of `part.items` are views of."""

    @classmethod
    def make(cls, config: AttentionConfig, tiles: Tiles, most: int, window: int, split: _Split) -> "_Plan":
        """Make a plan with places for at least `most` splits."""
        assert config.heads <= config.block_m
        memory = torch.empty(4 * most + tiles.num_tiles, dtype=torch.int32, device=tiles.table.device)
        items = Items(memory[: 4 * most].view(most, 4), memory[4 * most :])
        part = ContextPart(
            tiles=tiles, config=config, num_splits=1, split_tokens=0, in_parts=True, items=items
        )
        return cls(part=part, window=window, split=split, memory=memory)

    def items(self, lens: np.ndarray) -> np.ndarray:
        """Return what `memory` contains for contexts of lens (num_seqs,) tokens."""
        block_n = self.part.config.block_n
        begins = (
            np.maximum(lens - self.window, 0) // block_n * block_n if self.window else np.zeros_like(lens)
        )
        bases, firsts, counts, tokens = self.split(lens, begins)
        ends = counts.cumsum(dtype=np.int32)
        seq = np.repeat(np.arange(len(lens), dtype=np.int32), counts)
        number = np.arange(ends[-1]) - (ends - counts - firsts)[seq]
        begin = bases[seq] + number * tokens[seq]
        rows = np.full((self.part.num_items, 4), -1, np.int32)
        rows[: ends[-1]] = np.stack(
            (seq, number, np.maximum(begin, begins[seq]), np.minimum(begin + tokens[seq], lens[seq])), 1
        )
        return np.concatenate((rows.ravel(), ends))


def most_items(num_seqs: int, config: AttentionConfig, shape: AttentionShape, device: torch.device) -> int:
    """Return one item for each sequence, and twice as many more as occupy the device."""
    more = cdiv(num_programs(device, PROGRAMS_PER_PROCESSOR), config.num_head_blocks(shape))
    return num_seqs + 2 * more


def split_all(lens: np.ndarray, begins: np.ndarray, most: int, config: AttentionConfig) -> Splits:
    """Split what is seen of all contexts (num_seqs,) equally, at least one split each, at most `most` together: such that all
    programs run at once, or, where these would be too many, such that the device is occupied twice, by shorter ones."""
    spans = lens - begins
    total, more = int(spans.sum(dtype=np.int64)), (most - len(lens)) // 2
    for places in (max(more, 1), most - len(lens)):
        blocks = cdiv(cdiv(total, places), config.block_n)
        tokens = max(smallest_split(config), blocks * config.block_n)
        counts = -(-spans // tokens)
        if counts.sum() <= more:
            break
    each = -(-spans // counts)
    return begins, np.zeros_like(lens), counts, -(-each // config.block_n) * config.block_n


def split_at_multiples(lens: np.ndarray, begins: np.ndarray, tokens: int) -> Splits:
    """Split all contexts (num_seqs,) at multiples of `tokens`, but for what is not seen."""
    firsts = begins // tokens
    return np.zeros_like(lens), firsts, -(-lens // tokens) - firsts, np.full_like(lens, tokens)

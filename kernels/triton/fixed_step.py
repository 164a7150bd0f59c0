"""Steps whose kernels are launched alike whatever the lengths: `Ops.fixed_step`.

Attention's programs take items from tables of fixed length, each a tile of queries over a part of what they see; those without
an item end at once. A tile that is split takes places of results, of which there are as many as `attention_config.split_all` may
ask for; or, where parts end at fixed places so that bits are the same in any batch, as many as it takes for all tokens of the
pool."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionMeta
from kernels.triton.attention_config import FIXED, AttentionShape, LaunchPart, TileClass, classes, parts_of
from kernels.triton.platform import cdiv
from kernels.triton.tiles import (
    ITEM_FIELDS,
    SPLIT_TILE_FIELDS,
    Items,
    Splits,
    StepLens,
    Tiles,
    aligned,
    cut,
    items_of,
)


class TritonFixedStep:
    """`FixedStep`."""

    def __init__(
        self,
        num_rows: int,
        max_seqs: int,
        max_blocks: int,
        empty_block: int,
        block_size: int,
        device: torch.device,
        split_tokens: int = 0,
        *,
        larger: "TritonFixedStep | None" = None,
        tall: bool = False,
    ) -> None:
        """`split_tokens` > 0: contexts are split at its multiples, as by `attention.TritonAttention`. The table of blocks is that
        of `larger`. `tall`: see `FixedStep.smaller`."""
        self._num_rows, self._max_seqs = num_rows, (max_seqs := min(num_rows, max_seqs))
        self._empty_block, self._block_size, self._device = empty_block, block_size, device
        self._split_tokens, self._tall = split_tokens, tall
        if larger is None:
            self._host_table = np.zeros((max_seqs, max_blocks), np.int32)
            self._table = torch.zeros((max_seqs, max_blocks), dtype=torch.int32, device=device)
            self._table_rows: list[np.ndarray | None] = [None] * max_seqs
            """What each row of the table begins with. A sequence's row stays as it is until it has more blocks."""
        else:
            self._host_table, self._table, self._table_rows = (
                larger._host_table,
                larger._table,
                larger._table_rows,
            )
        self._plans: dict[tuple[AttentionShape, int], _Plan] = {}
        self._lens = self._with_padding((), ())
        slots, counted = torch.zeros((2, num_rows), dtype=torch.int64, device=device).unbind(0)
        lens, starts = (1,) * num_rows, tuple(range(num_rows + 1))
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
        self.fill([torch.from_numpy(each).to(device) for each in self.inputs((), (), (), ())])

    @property
    def has_tall(self) -> bool:
        return not self._split_tokens  # one height for all where bits are promised

    def smaller(self, num_rows: int, *, tall: bool = False) -> "TritonFixedStep":
        return TritonFixedStep(
            num_rows, len(self._host_table), self._host_table.shape[1], self._empty_block, self._block_size, self._device,
            self._split_tokens, larger=self, tall=tall,
        )  # fmt: skip

    def fits(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
        if len(query_lens) > self._max_seqs:
            return False
        if not self._split_tokens:
            return True
        lens = self._with_padding(query_lens, context_lens)
        return all(plan.has_places(lens) for plan in self._plans.values())

    def inputs(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[np.ndarray],
        slots: Sequence[int] | np.ndarray,
    ) -> list[np.ndarray]:
        for row, ids in enumerate(block_tables):
            if ids is not self._table_rows[row]:
                self._host_table[row, : len(ids)] = ids
                self._table_rows[row] = ids
        table = self._host_table[: max(1, len(block_tables)), : max(map(len, block_tables), default=1)]
        self._lens = self._with_padding(query_lens, context_lens)
        num = len(slots)
        rows = np.full((2, self._num_rows), self._empty_block * self._block_size, np.int64)
        rows[0, :num], rows[1] = slots, np.arange(self._num_rows) < num
        return [table, *rows, *(plan.contents(self._lens) for plan in self._plans.values())]

    def _with_padding(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> StepLens:
        """Return the step with its last rows, which are nobody's, as a sequence that sees nothing."""
        left = self._num_rows - sum(query_lens)
        if not left:
            return StepLens.of(query_lens, context_lens)
        return StepLens.of((*query_lens, left), (*context_lens, 0))

    def fill(self, inputs: Sequence[Tensor]) -> None:
        assert self.meta.counted is not None
        rows, columns = inputs[0].shape
        targets = self._table[:rows, :columns], self.meta.slots, self.meta.counted
        for target, values in zip(
            (*targets, *(plan.memory for plan in self._plans.values())), inputs, strict=True
        ):
            target.copy_(values)

    def parts(self, shape: AttentionShape, window: int) -> Sequence[LaunchPart]:
        """Return the parts of all layers of that shape and window. They are made when the first asks for them, and filled from
        then on."""
        key = (shape, window)
        if (plan := self._plans.get(key)) is None:
            assert shape.split_tokens == self._split_tokens
            plan = self._plans[key] = self._plan(shape, window)
            plan.memory.copy_(torch.from_numpy(plan.contents(self._lens)))
        return plan.launches

    def _plan(self, shape: AttentionShape, window: int) -> "_Plan":
        among = classes(shape, self._device)
        among = among if self._tall else among[:1]
        parts = list[_Part]()
        for each, behind in zip_longest(among, among[1:]):
            seqs = min(self._max_seqs, self._num_rows // each.fewest) + 1  # and the padding
            further = 0 if behind is not None else self._num_rows // each.tokens_per_tile
            parts.append(self._part(each, min(self._num_rows, seqs + further), shape))
        return _Plan.make(parts, self._table, shape, window)

    def _part(self, own: TileClass, num_tiles: int, shape: AttentionShape) -> "_Part":
        if tokens := self._split_tokens:
            longest = cdiv(self._table.shape[1] * self._block_size, tokens)
            most = min(num_tiles * longest, num_tiles + self._empty_block * self._block_size // tokens)
            return _Part(own, num_items=most, num_split_tiles=num_tiles, num_places=most)
        more = own.most_further(shape, self._device)
        return _Part(
            own, num_items=num_tiles + more, num_split_tiles=min(num_tiles, more), num_places=2 * more
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """One launch, and the lengths of its tables."""

    own: TileClass
    num_items: int
    num_split_tiles: int
    num_places: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    parts: Sequence[_Part]
    launches: Sequence[LaunchPart]
    shape: AttentionShape
    window: int
    memory: Tensor
    """The int32 memory that all of the launches' items are views of."""

    @classmethod
    def make(cls, parts: Sequence[_Part], table: Tensor, shape: AttentionShape, window: int) -> "_Plan":
        sizes = [
            aligned(size)
            for part in parts
            for size in (part.num_items * ITEM_FIELDS, part.num_split_tiles * SPLIT_TILE_FIELDS)
        ]
        memory = torch.empty(sum(sizes), dtype=torch.int32, device=table.device)
        pieces = memory.split(sizes)
        launches = [
            LaunchPart(
                part.own.config,
                Items(
                    items=items[: part.num_items * ITEM_FIELDS].view(-1, ITEM_FIELDS),
                    split_tiles=split_tiles[: part.num_split_tiles * SPLIT_TILE_FIELDS].view(
                        -1, SPLIT_TILE_FIELDS
                    ),
                    table=table,
                    num_places=part.num_places,
                    most_tokens=part.own.tokens_per_tile,
                ),
            )
            for part, items, split_tiles in zip(parts, pieces[::2], pieces[1::2], strict=True)
        ]
        return cls(parts=parts, launches=launches, shape=shape, window=window, memory=memory)

    def contents(self, lens: StepLens) -> np.ndarray:
        """Return what `memory` contains for a step."""
        memory, at = np.zeros(len(self.memory), np.int32), 0
        for part, tiles in self._cut(lens):
            items, split_tiles = items_of(tiles, self._split(part, tiles))
            memory[at : at + items.size] = items.ravel()
            memory[at + items.size : at + part.num_items * ITEM_FIELDS] = -1
            at += aligned(part.num_items * ITEM_FIELDS)
            memory[at : at + split_tiles.size] = split_tiles.ravel()
            at += aligned(part.num_split_tiles * SPLIT_TILE_FIELDS)
        return memory

    def has_places(self, lens: StepLens) -> bool:
        return all(
            self._split(part, tiles).counts.sum() <= part.num_places for part, tiles in self._cut(lens)
        )

    def _cut(self, lens: StepLens) -> Iterator[tuple[_Part, Tiles]]:
        own = parts_of(lens, [part.own for part in self.parts])
        for part, (_, seqs) in zip(self.parts, own, strict=True):
            yield part, cut(lens, seqs, part.own.tokens_per_tile, self.window, part.own.config.block_n)

    def _split(self, part: _Part, tiles: Tiles) -> Splits:
        return part.own.split(tiles, self.shape, self.memory.device)

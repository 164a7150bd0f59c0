"""Draft tokens by a head of the model, on the rank that samples: a layer with KV of its own that reads the model's hidden states.

Behind each step it reads what the step has computed, whoever is asked for draft tokens next: the states are gone afterwards. That
takes as long as one more layer. A draft token behind the first takes the head's own state in place of the one that is not
computed yet. What it computes of that is computed again from the model's state when there is one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from core.kv import KVShard
from core.plan import StepPlan
from engine.execution.batch.batch import RankSeq
from engine.execution.drafting.head_kv import HeadBlocks, HeadSeq
from engine.execution.drafting.proposing import Agree, Proposal, sample_drafts
from engine.execution.pools.kv_pool import copy_slots, layers_of, pool_parts
from kernels.ops import AttentionMeta
from models.drafting.drafting_head import DraftingHead

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [start, end) of a sequence, each of which is joined to the one behind it."""

    head_seq: HeadSeq
    block_ids: tuple[int, ...]
    start: int
    end: int


class DraftHead:
    """A `Proposer`."""

    def __init__(
        self,
        head: DraftingHead,
        shard: KVShard,
        num_blocks: int,
        device: torch.device = _CPU,
        agree: Agree | None = None,
    ) -> None:
        """`shard` is of one layer, in blocks of as many tokens as the target's, of which there are `num_blocks`. `agree` is as
        in `sample_drafts`, where several ranks propose."""
        self._head, self._device, self._agree = head, device, agree
        self._block_size = shard.layout.block_size
        flat = torch.zeros(shard.pool_bytes(num_blocks), dtype=torch.uint8, device=device)
        self._parts = pool_parts(shard, num_blocks, flat)
        [self._layer] = layers_of(shard, self._parts)
        self._blocks = HeadBlocks(self._block_size)
        self._seqs: dict[str, HeadSeq] = {}
        self._last: dict[str, Tensor] = {}
        """(hidden_size,): the head's state that says what follows all known tokens. Not every sequence has one."""
        self._hidden: Tensor | None = None

    def begin(self, key: str, seq: RankSeq) -> None:
        self._seqs[key] = HeadSeq(seq, self._blocks)

    def end(self, key: str) -> None:
        self._seqs.pop(key, None)
        self._last.pop(key, None)

    @torch.inference_mode()
    def propose(self, asked: Sequence[Proposal]) -> bool:
        going = [one for one in asked if one.key in self._last]
        states = torch.stack([self._last[one.key] for one in going]) if going else None
        while states is not None:
            sample_drafts(going, self._head.logits(states), self._head.ops, self._agree)
            rows = [row for row, one in enumerate(going) if not one.is_done]
            if not rows:
                break
            going = [going[row] for row in rows]
            pieces = [self._drafted(one) for one in going]
            states = self._forward(pieces, states[rows])
        return False

    def hear(self, hidden: Tensor) -> None:
        self._hidden = hidden

    @torch.inference_mode()
    def computed(self, plan: StepPlan) -> None:
        copy_slots(self._parts, plan.copies)
        self._blocks.copied(plan.copies)
        pieces: dict[str, _Piece] = {}
        rows: list[int] = []
        first = 0
        for work in plan.work:
            head_seq = self._seqs[work.key]
            start = head_seq.start(work.start, work.block_ids)
            # The token behind it must be known, and what was computed behind a wrong draft token counts for nothing.
            end = min(work.start + work.count, head_seq.seq.num_tokens - 1)
            if start < end:
                pieces[work.key] = _Piece(head_seq, work.block_ids, start, end)
                rows += range(first + start - work.start, first + end - work.start)
            first += work.count
        hidden, self._hidden = self._hidden, None
        if pieces and hidden is not None:
            taken = torch.tensor(rows, device=hidden.device)
            self._read(pieces, self._head.read(hidden).index_select(0, taken))

    def _read(self, pieces: dict[str, _Piece], states: Tensor) -> None:
        last = self._forward([*pieces.values()], states)
        for (key, piece), state in zip(pieces.items(), last, strict=True):
            piece.head_seq.computed(piece.start, piece.end, piece.block_ids)
            self._last.pop(key, None)
            if piece.end == piece.head_seq.seq.num_tokens - 1:
                self._last[key] = state

    def _drafted(self, one: Proposal) -> _Piece:
        """Return the place of a sequence's last draft token."""
        at, head_seq = one.seq.num_tokens + len(one.drafts) - 2, self._seqs[one.key]
        head_seq.drafted(at, one.block_ids)
        return _Piece(head_seq, one.block_ids, at, at + 1)

    def _forward(self, pieces: Sequence[_Piece], states: Tensor) -> Tensor:
        """(T, hidden_size), the states of the pieces' tokens -> (N, hidden_size), the head's behind the last token of each."""
        size = self._block_size
        spans = [np.arange(piece.start, piece.end) for piece in pieces]
        tables = [piece.head_seq.seq.block_table(piece.block_ids) for piece in pieces]
        slots = [table[span // size] * size + span % size for table, span in zip(tables, spans, strict=True)]
        firsts = [piece.head_seq.first_block for piece in pieces]
        lens = [len(span) for span in spans]
        meta = AttentionMeta.build(
            lens,
            [piece.end - first * size for piece, first in zip(pieces, firsts, strict=True)],
            [table[first:] for table, first in zip(tables, firsts, strict=True)],
            np.concatenate(slots),
            self._device,
        )
        tokens, positions = (
            torch.from_numpy(np.concatenate(parts)).to(self._device)
            for parts in (
                [piece.head_seq.seq.tokens[piece.start + 1 : piece.end + 1] for piece in pieces],
                spans,
            )
        )
        out = self._head.forward(tokens, states, positions, self._layer, meta)
        ends = torch.tensor([end - 1 for end in accumulate(lens)], device=out.device)
        return out.index_select(0, ends)

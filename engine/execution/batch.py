"""What a rank knows of its sequences, and a step's packed tensors.

The rank appends its own samples, so a plan needs no tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from core.plan import NewSeq, SeqWork
from core.types import PromptScore, SamplingParams
from kernels.ops import AttentionMeta, StateBlocks


class History(Protocol):
    """What the draw of a token depends on, beside its logits: the tokens before it."""

    @property
    def tokens(self) -> np.ndarray:
        """int64; the first `num_tokens` count."""
        ...

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...


class RankSeq:
    """Tokens of one sequence, known and drawn, in a preallocated array."""

    __slots__ = ("num_prompt", "num_tokens", "pooled", "sampling", "scores", "table", "table_ids", "tokens")

    def __init__(self, new: NewSeq) -> None:
        known = len(new.tokens)
        # Zeros: what a step computes beyond a draw that was put off must be a token of the vocabulary.
        self.tokens = np.zeros(known + new.sampling.max_tokens + 1, np.int64)
        self.tokens[:known] = new.tokens
        self.num_tokens = known
        self.num_prompt = new.num_prompt
        self.sampling: SamplingParams = new.sampling
        self.pooled: torch.Tensor | None = None
        """(hidden_size,) float32: the sum, or the last, of the prompt's hidden states so far. None where no embedding is
        wanted."""
        is_scored = new.sampling.num_prompt_logprobs >= 0 and known == new.num_prompt
        self.scores: list[PromptScore] | None = [] if is_scored else None
        """Scores of the prompt's tokens computed so far. None where nobody asked for them, or they have been sent."""
        self.table: np.ndarray = np.empty(0, np.int64)
        self.table_ids: tuple[int, ...] = ()

    def append(self, token: int) -> None:
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def guess(self, work: SeqWork) -> None:
        """Put the drafts of `work` where the tokens that they guess will be."""
        end = work.start + work.count
        self.tokens[end - len(work.drafts) : end] = work.drafts

    def block_table(self, block_ids: tuple[int, ...]) -> np.ndarray:
        """`block_ids` as an array; converted again only when the planner has added blocks."""
        if self.table_ids is not block_ids:
            self.table_ids = block_ids
            self.table = np.array(block_ids, np.int64)
        return self.table


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: torch.Tensor
    """(T,) int64"""
    positions: torch.Tensor
    """(T,) int64"""
    meta: AttentionMeta
    sample_rows: torch.Tensor
    """(N,) int64: rows of the packed tokens after which a token is drawn."""

    def written(self, block_size: int) -> torch.Tensor:
        """Return the slots that the step writes, (T,) int64 and those of the sequences' states."""
        if (states := self.meta.states) is None:
            return self.meta.slots
        first = states.blocks.flatten()[:, None] * block_size
        own = first + torch.arange(block_size, device=first.device)
        return torch.cat((self.meta.slots, own.flatten()))


def build_batch(
    work: Sequence[SeqWork],
    seqs: Sequence[RankSeq],
    block_size: int,
    device: torch.device,
    num_state_blocks: int = 0,
) -> Batch:
    """Pack a step's work; `seqs[i]` belongs to `work[i]`. The first `num_state_blocks` of a sequence have its state."""
    total = sum(item.count for item in work)
    tokens, positions, slots = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    tables: list[np.ndarray] = []
    states: list[np.ndarray] = []
    rows: list[int] = []
    at = 0
    for item, seq in zip(work, seqs, strict=True):
        start, count = item.start, item.count
        table = seq.block_table(item.block_ids)
        if num_state_blocks:
            states.append(table[:num_state_blocks])
            table = table[num_state_blocks:]
        tables.append(table)
        if count == 1:
            tokens[at] = seq.tokens[start]
            positions[at] = start
            slots[at] = table[start // block_size] * block_size + start % block_size
        else:
            span = np.arange(start, start + count)
            tokens[at : at + count] = seq.tokens[start : start + count]
            positions[at : at + count] = span
            slots[at : at + count] = table[span // block_size] * block_size + span % block_size
        at += count
        if item.samples:
            rows += range(at - 1 - len(item.drafts), at)
    meta = AttentionMeta.build(
        tuple(item.count for item in work),
        tuple(item.start + item.count for item in work),
        tables,
        slots,
        device,
        _states(work, states, device) if states else None,
    )
    return Batch(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(positions).to(device),
        meta,
        torch.tensor(rows, dtype=torch.int64, device=device),
    )


def _states(work: Sequence[SeqWork], blocks: Sequence[np.ndarray], device: torch.device) -> StateBlocks:
    begins = torch.tensor([item.start == 0 for item in work])
    return StateBlocks(torch.from_numpy(np.stack(blocks)).to(device), begins.to(device))

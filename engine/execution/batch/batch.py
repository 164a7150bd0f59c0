"""What a rank knows of its sequences, and a step's packed tensors.

The rank appends its own samples, so a plan needs no tokens. A step may be packed before the host knows what the one before it has
sampled: those tokens are read where they lie on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from core.plan import NewSeq, SeqWork
from core.records import record
from core.types import PromptScore, SamplingParams
from engine.execution.batch.adapter_rows import NO_ADAPTERS, AdapterRows
from engine.execution.batch.attention_pieces import AttentionPieces
from engine.execution.batch.host_needs import host_needs
from engine.execution.batch.image_positions import in_planes
from engine.execution.batch.step_memory import HostSteps, Pack, Placed, StepIO
from kernels.ops import AttentionMeta, StateBlocks


class History(Protocol):
    """What the sample of a token depends on, beside its logits: the tokens before it."""

    @property
    def tokens(self) -> np.ndarray:
        """int64; the first `num_tokens` count, but for the last of them where it has a `last_place`."""
        ...

    @property
    def last_place(self) -> int | None:
        """Where the last token is on the device (`StepIO.place`). None where the host knows it."""
        ...

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...


class RankSeq:
    """Tokens of one sequence, known and sampled, in a preallocated array."""

    __slots__ = (
        "host_needs",
        "images",
        "num_prompt",
        "num_tokens",
        "place",
        "pooled",
        "position_shift",
        "reads_prompt",
        "sampled_at",
        "sampling",
        "scores",
        "table",
        "table_ids",
        "table_tensor",
        "tokens",
    )

    def __init__(self, new: NewSeq) -> None:
        known = len(new.tokens)
        # Zeros: what a step computes beyond a sample that was put off must be a token of the vocabulary.
        self.tokens = np.zeros(known + new.sampling.max_tokens + 1, np.int64)
        self.tokens[:known] = new.tokens
        self.num_tokens = known
        self.num_prompt = new.num_prompt
        self.sampling: SamplingParams = new.sampling
        self.host_needs = host_needs(new.sampling)
        """As the function says of its parameters; empty: nothing."""
        self.images, self.position_shift = new.images, new.position_shift
        self.pooled: torch.Tensor | None = None
        """(hidden_size,) float32: the sum, or the last, of the prompt's hidden states so far. None where no embedding is
        wanted."""
        is_scored = new.sampling.num_prompt_logprobs >= 0 and known == new.num_prompt
        self.scores: list[PromptScore] | None = [] if is_scored else None
        """Scores of the prompt's tokens computed so far. None where nobody asked for them, or they have been sent."""
        self.reads_prompt = is_scored or bool(new.sampling.pooling)
        """Whether anything but tokens is wanted of the prompt."""
        self.table: np.ndarray = np.empty(0, np.int64)
        self.table_ids: tuple[int, ...] = ()
        self.table_tensor: torch.Tensor = torch.from_numpy(self.table)
        self.sampled_at = self.place = -1
        """The last token sampled on the device, and its place there until the host knows it (`StepIO.place`)."""

    def append(self, token: int) -> None:
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    @property
    def last_place(self) -> None:
        return None

    def place_of(self, at: int) -> int | None:
        """Return where token `at` is on the device. None where the host knows it, or nobody."""
        return self.place if self.num_tokens <= at == self.sampled_at else None

    def put_drafts(self, work: SeqWork) -> None:
        """Put the draft tokens of `work` where the sampled tokens will be."""
        end = work.start + work.count
        self.tokens[end - len(work.drafts) : end] = work.drafts

    def block_table(self, block_ids: tuple[int, ...]) -> np.ndarray:
        """`block_ids` as an array, and as `table_tensor`; converted again only when the planner has added blocks."""
        if self.table_ids is not block_ids:
            self.table_ids = block_ids
            self.table = np.array(block_ids, np.int64)
            self.table_tensor = torch.from_numpy(self.table)
        return self.table


@record()
class Batch:
    tokens: torch.Tensor
    """(T,) int64"""
    positions: torch.Tensor
    """(T,) or (3, T) int64, as `models.causal_model.CausalModel.forward` takes them."""
    meta: AttentionMeta
    sample_rows: torch.Tensor | None
    """(N,) int64: rows of the packed tokens after which a token is sampled; None for all of them."""

    def sampled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows of `hidden` (T, hidden_size) behind which a token is sampled."""
        return hidden if self.sample_rows is None else hidden.index_select(0, self.sample_rows)

    def written(self, block_size: int) -> torch.Tensor:
        """Return the slots that the step writes, (T,) int64 and those of the sequences' states."""
        if self.meta.states is None:
            return self.meta.slots
        return torch.cat((self.meta.slots, self.state_slots(block_size)))

    def state_slots(self, block_size: int) -> torch.Tensor:
        """Return the slots of the sequences' states, (N,) int64."""
        assert self.meta.states is not None
        first = self.meta.states.blocks.flatten()[:, None] * block_size
        return (first + torch.arange(block_size, device=first.device)).flatten()


class PackedBatch:
    """A step's work, packed on the host. Call `batch` when `pack` is sent."""

    def __init__(
        self,
        work: Sequence[SeqWork],
        seqs: Sequence[RankSeq],
        block_size: int,
        pack: Pack,
        num_state_blocks: int = 0,
        read_lens: tuple[int, ...] | None = None,
        *,
        only_decodes: bool = False,
    ) -> None:
        """`seqs[i]` belongs to `work[i]`. The first `num_state_blocks` of a sequence have its state. `read_lens` is as in
        `AttentionMeta`, for sequences that are not cut. `only_decodes` is as in `StepPlan`: nothing else is looked for."""
        self._read_lens = read_lens
        tables = [seq.block_table(item.block_ids) for item, seq in zip(work, seqs, strict=True)]
        own_tables = [seq.table_tensor for seq in seqs]
        if num_state_blocks:
            own_tables = [table[num_state_blocks:] for table in own_tables]
        tokens, positions, slots = packed_rows(work, seqs, block_size, num_state_blocks)
        self._num_drafts, self._sample_rows, self._adapters = (), None, NO_ADAPTERS
        if only_decodes:
            self._pieces = AttentionPieces.of_decodes(work, own_tables)
        else:
            self._pieces = AttentionPieces.of(work, own_tables)
            if any(item.has_image for item in work):
                positions = in_planes(positions, work, [seq.images for seq in seqs])
            to_sample = sampled_rows(work)
            self._sample_rows = (
                pack.add(np.array(to_sample, np.int64)) if len(to_sample) < len(tokens) else None
            )
            self._adapters = AdapterRows([item.adapter for item in work], [item.count for item in work], pack)
            drafts = tuple(len(item.drafts) for item in work)
            self._num_drafts = drafts if any(drafts) else ()
        self._tokens, self._positions, self._slots = (pack.add(each) for each in (tokens, positions, slots))
        self._sampled = OnDevice.of(work, seqs, pack)
        self._states: tuple[Placed, Placed] | None = None
        if num_state_blocks and work:
            begins = np.array([item.start == 0 for item in work])
            states = np.stack([table[:num_state_blocks] for table in tables])
            self._states = pack.add(states), pack.add(begins)

    def batch(self, step: StepIO) -> Batch:
        tokens = self._tokens()
        if self._sampled is not None:
            self._sampled.fill(tokens, step)
        states = None
        if self._states is not None:
            blocks, begins = self._states
            states = StateBlocks(blocks(), begins(), self._num_drafts)
        pieces = self._pieces
        meta = AttentionMeta.over(
            pieces.query_lens,
            pieces.context_lens,
            pieces.tables,
            self._slots(),
            states,
            self._adapters.rows(),
            None if pieces.both_ways else self._read_lens,
            both_ways=pieces.both_ways,
        )
        sample_rows = self._sample_rows() if self._sample_rows is not None else None
        return Batch(tokens, self._positions(), meta, sample_rows)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The tokens of a step that the host does not know yet: the step before has sampled them."""

    rows: Placed
    places: Placed

    @classmethod
    def of(cls, work: Sequence[SeqWork], seqs: Sequence[RankSeq], pack: Pack) -> "OnDevice | None":
        rows, places, row = list[int](), list[int](), 0
        for item, seq in zip(work, seqs, strict=True):
            # `RankSeq.place_of`, without a call for each of them in each step.
            if seq.num_tokens <= item.start == seq.sampled_at and item.count == 1:
                rows.append(row)
                places.append(seq.place)
            row += item.count
        if not rows:
            return None
        return cls(pack.add(np.array(rows, np.int64)), pack.add(np.array(places, np.int64)))

    def fill(self, tokens: torch.Tensor, step: StepIO) -> None:
        """Put them among the packed `tokens`, in place."""
        tokens.index_copy_(0, self.rows(), step.known(self.places()))


def build_batch(
    work: Sequence[SeqWork],
    seqs: Sequence[RankSeq],
    block_size: int,
    device: torch.device,
    num_state_blocks: int = 0,
) -> Batch:
    """Pack a step's work, all of whose tokens the host knows."""
    pack, step = Pack(), HostSteps(device).begin()
    packed = PackedBatch(work, seqs, block_size, pack, num_state_blocks)
    pack.send(step.upload)
    return packed.batch(step)


def sampled_rows(work: Sequence[SeqWork]) -> list[int]:
    """Return the rows behind which a token is sampled."""
    found: list[int] = []
    end = 0
    for item in work:
        end += item.count
        if item.samples:
            found += range(end - 1 - len(item.drafts), end)
    return found


def packed_rows(
    work: Sequence[SeqWork], seqs: Sequence[RankSeq], block_size: int, num_state_blocks: int = 0
) -> np.ndarray:
    """Return tokens, positions and slots: (3, T) int64."""
    ones = [number for number, item in enumerate(work) if item.count == 1]
    if len(ones) == len(work):
        return _rows_of_one(work, seqs, block_size, num_state_blocks)
    rows, at = np.empty((3, sum(item.count for item in work)), np.int64), 0
    places = list[int]()
    for item, seq in zip(work, seqs, strict=True):
        start, count = item.start, item.count
        if count == 1:
            places.append(at)
        else:
            span, into = np.arange(start, start + count), rows[:, at : at + count]
            into[0], into[1] = seq.tokens[start : start + count], span + seq.position_shift
            into[2] = seq.table[num_state_blocks + span // block_size] * block_size + span % block_size
        at += count
    short, their_seqs = [work[number] for number in ones], [seqs[number] for number in ones]
    rows[:, places] = _rows_of_one(short, their_seqs, block_size, num_state_blocks)
    return rows


def _rows_of_one(
    work: Sequence[SeqWork], seqs: Sequence[RankSeq], block_size: int, num_state_blocks: int
) -> np.ndarray:
    """Return what `packed_rows` has of works of one token."""
    starts = np.array([item.start for item in work], np.int64)
    shifts = np.array([seq.position_shift for seq in seqs], np.int64)
    blocks = [item.block_ids[num_state_blocks + item.start // block_size] for item in work]
    rows = np.empty((3, len(work)), np.int64)
    rows[0] = [seq.tokens.item(item.start) for item, seq in zip(work, seqs, strict=True)]
    rows[1], rows[2] = starts + shifts, np.array(blocks, np.int64) * block_size + starts % block_size
    return rows

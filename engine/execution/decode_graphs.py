"""Decode steps replayed from captured launches (ADR 014). A step is padded to the next captured size; its inputs lie in fixed
memory.

Replays differ only in what that memory contains. The product with the head, and sampling, are launched as usual: they take only
the rows of real sequences."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.plan import SeqWork
from engine.execution.batch import OnDevice, RankSeq
from engine.execution.graph_capture import Capture, Launch
from engine.execution.mirrored_pool import MirroredPool
from engine.execution.resident_pool import ResidentPool
from engine.execution.step_memory import Pack, Placed, StepIO
from kernels.ops import FixedDecode
from models.causal_model import CausalModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Captured:
    rows: Tensor
    """(2, size) int64: tokens and their positions."""
    states: Tensor | None
    """(size, hidden_size): what the stage before passes on; None where the model begins with tokens."""
    fixed: FixedDecode
    replay: Launch


class DecodeGraphs:
    """The graphs of one rank, for one thread."""

    @torch.inference_mode()
    def __init__(
        self,
        model: CausalModel,
        pool: MirroredPool | ResidentPool,
        block_size: int,
        max_blocks: int,
        sizes: Sequence[int],
        capture: Capture,
    ) -> None:
        """Capture all `sizes`, the largest first, so that its scratch memory has room for the others'. `max_blocks` is the number
        of blocks of the longest context."""
        self._model, self._pool, self._block_size, self._max_blocks = model, pool, block_size, max_blocks
        self._captured: dict[int, _Captured] = {}
        started = time.perf_counter()
        self._sizes = sorted(set(sizes))
        for size in reversed(self._sizes):
            self._captured[size] = self._make(size, capture)
            _log.info("decode steps of %d sequences are captured", size)
        _log.info(
            "%d sizes of decode steps captured in %.1f s", len(self._sizes), time.perf_counter() - started
        )

    def _make(self, size: int, capture: Capture) -> _Captured:
        model, pool, device = self._model, self._pool, self._pool.device
        assert model.ops.fixed_decode is not None
        fixed = model.ops.fixed_decode(size, self._max_blocks, pool.empty_block, self._block_size, device)
        rows = torch.zeros((2, size), dtype=torch.int64, device=device)
        states = None
        if not model.is_first:
            states = torch.zeros((size, model.spec.hidden_size), dtype=model.dtype, device=device)
        x = rows[0] if states is None else states
        replay = capture(lambda: model.forward(x, rows[1], pool.layers, fixed.meta))
        return _Captured(rows, states, fixed, replay)

    def padded(self, *groups: Sequence[SeqWork]) -> int:
        """Return the number of sequences that each group's replay of the step has; 0 where the step is launched.

        Groups of ranks meet in a replay with equally many rows, so all replay a step or none: where it is decode alone for all of
        them, nobody waits for its layers, no sequence has an adapter or a picture to compute, no group has more than were
        captured, and all contexts have places. Some groups may have no work."""
        most = max(map(len, groups))
        each = [item for work in groups for item in work]
        if not 0 < most <= self._sizes[-1] or not all(map(_is_plain_decode, each)):
            return 0
        size = next(size for size in self._sizes if size >= most)
        fits = self._captured[size].fixed.fits
        return size if all(fits([item.start + 1 for item in work]) for work in groups) else 0

    def pack(self, size: int, work: Sequence[SeqWork], seqs: Sequence[RankSeq], pack: Pack) -> "Replay":
        """Add to `pack` the inputs of one group's work, `padded` to `size`."""
        captured = self._captured[size]
        block, slots, tables = self._block_size, list[int](), list[np.ndarray]()
        for item, seq in zip(work, seqs, strict=True):
            at, ids = item.start, item.block_ids
            slots.append(ids[at // block] * block + at % block)
            tables.append(seq.block_table(ids))
        starts = np.array([item.start for item in work], np.int64)
        rows = np.zeros(captured.rows.shape, np.int64)
        rows[0, : len(work)] = [seq.tokens.item(item.start) for item, seq in zip(work, seqs, strict=True)]
        rows[1, : len(work)] = starts + [seq.position_shift for seq in seqs]
        drawing = [row for row, item in enumerate(work) if item.samples]
        return Replay(
            captured=captured,
            pool=self._pool,
            num_seqs=len(work),
            rows=pack.add(rows),
            drawn=OnDevice.of(work, seqs, pack),
            fixed=[pack.add(each) for each in captured.fixed.inputs((starts + 1).tolist(), tables, slots)],
            sample_rows=pack.add(np.array(drawing, np.int64)) if len(drawing) < len(work) else None,
        )


def _is_plain_decode(item: SeqWork) -> bool:
    return item.count == 1 and item.push is None and not item.adapter and not item.has_picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One step's. Call `hidden` when its pack is sent."""

    captured: _Captured
    pool: MirroredPool | ResidentPool
    num_seqs: int
    rows: Placed
    drawn: OnDevice | None
    fixed: Sequence[Placed]
    sample_rows: Placed | None
    """None where all rows draw."""

    def hidden(self, step: StepIO, states: Tensor | None = None) -> Tensor:
        """Return (N, hidden_size), a row for each sequence, which the next replay overwrites. All KV is written. `states` (N,
        hidden_size) are those of the stage before, where there is one."""
        captured = self.captured
        captured.rows.copy_(self.rows())
        if captured.states is not None:
            assert states is not None, "a stage before"
            captured.states[: self.num_seqs].copy_(states)
        if self.drawn is not None:
            self.drawn.fill(captured.rows[0], step)
        captured.fixed.fill([each() for each in self.fixed])
        out = captured.replay()[: self.num_seqs]
        self.pool.written_in_all(captured.fixed.meta.slots[: self.num_seqs])
        return out

    def sampled(self, hidden: Tensor) -> Tensor:
        """Return the rows of `hidden` behind which a token is drawn."""
        return hidden if self.sample_rows is None else hidden.index_select(0, self.sample_rows())

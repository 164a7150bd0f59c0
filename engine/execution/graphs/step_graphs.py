"""Steps replayed from captured launches (ADR 104). A step is padded to the next captured size; its inputs lie in fixed memory.

A replay's rows are tokens: those of sequences that decode, draft tokens, and those of pieces of prompts. Each layer
writes all KV of the step before it attends, so a row sees the rows before it.

Replays differ only in what that memory contains. The product with the head, and sampling, are launched as usual: they take only
the rows behind which a token is sampled."""

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from core.cost.steps import chunk_pairs
from core.plan import SeqWork
from core.ports import LayerDone
from engine.execution.batch.batch import OnDevice, RankSeq, packed_rows, sampled_rows
from engine.execution.batch.step_memory import Pack, Placed, StepIO
from engine.execution.graphs.graph_capture import Capture, Launch
from engine.execution.pools.layer_marks import LayerMarks
from engine.execution.pools.resident_pool import ResidentPool
from kernels.ops import FixedStep
from models.causal_model import CausalModel

_log = logging.getLogger(__name__)

_MOST_PAIRS = 1 << 18
"""The most pairs of a token of a prompt with one that it sees for which low tiles, of a few of its tokens, are the faster."""
_TALL_SIZES = 64
"""Steps with tall tiles are captured at multiples of it: they compute much, and padding is little beside."""
_LONG_S = 1.0
"""A capture that takes so long is told of."""


@dataclass(frozen=True, slots=True)
class _Captured:
    rows: Tensor
    """(2, size) int64: tokens and their positions."""
    states: Tensor | None
    """(size, hidden_size): what the stage before passes on; None where the model begins with tokens."""
    fixed: FixedStep
    replay: Launch


class StepGraphs:
    """The graphs of one rank, for one thread."""

    @torch.inference_mode()
    def __init__(
        self,
        model: CausalModel,
        pool: ResidentPool,
        block_size: int,
        max_blocks: int,
        sizes: Sequence[int],
        capture: Capture,
        *,
        max_seqs: int,
        marks: LayerMarks | None = None,
    ) -> None:
        """Capture all `sizes`, the largest first, so that its scratch memory and tables have room for the others'. A step has at
        most `max_seqs` sequences, and the longest context `max_blocks` blocks. `marks`: replays mark their layers. Without it
        layers are written when a replay is over."""
        self._marks = marks
        self._model, self._pool, self._block_size = model, pool, block_size
        self._sizes = sorted(set(sizes))
        self._states: Tensor | None = None
        if not model.is_first:
            shape = (self._sizes[-1], model.spec.hidden_size)
            self._states = torch.zeros(shape, dtype=model.dtype, device=pool.device)
        self._low: dict[int, _Captured] = {}
        self._tall: dict[int, _Captured] = {}
        """For steps whose prompts see many tokens, where these have captures of their own."""
        assert model.ops.fixed_step is not None
        largest = model.ops.fixed_step(
            self._sizes[-1], max_seqs, max_blocks, pool.empty_block, block_size, pool.device
        )
        tall = [size for size in self._sizes if not size % _TALL_SIZES or size == self._sizes[-1]]
        self._tall_sizes = tall if largest.has_tall else []
        num_captures, started = len(self._sizes) + len(self._tall_sizes), time.perf_counter()
        _log.info(
            "%d steps of up to %d tokens are captured: the first ones compile kernels",
            num_captures,
            self._sizes[-1],
        )
        for size in reversed(self._tall_sizes):
            self._tall[size] = self._make(size, largest.smaller(size, tall=True), capture)
        for size in reversed(self._sizes):
            self._low[size] = self._make(size, largest.smaller(size), capture)
        if marks is not None:
            marks.captured()
        _log.info("%d steps were captured in %.1f s", num_captures, time.perf_counter() - started)

    def _make(self, size: int, fixed: FixedStep, capture: Capture) -> _Captured:
        model, pool, device = self._model, self._pool, self._pool.device
        rows = torch.zeros((2, size), dtype=torch.int64, device=device)
        states = None if self._states is None else self._states[:size]
        x = rows[0] if states is None else states
        marks = self._marks

        def launch() -> Tensor:
            if marks is None:
                return model.forward(x, rows[1], pool.layers, fixed.meta)
            marks.begin()
            return model.forward(x, rows[1], pool.layers, fixed.meta, marks.written)

        started = time.perf_counter()
        replay, took_s = capture(launch), time.perf_counter() - started
        _log.log(
            logging.INFO if took_s >= _LONG_S else logging.DEBUG,
            "a step of %d tokens was captured in %.1f s",
            size,
            took_s,
        )
        return _Captured(rows, states, fixed, replay)

    def padded(self, *groups: Sequence[SeqWork]) -> int:
        """Return the number of rows that each group's replay of the step has; 0 where the step is launched.

        Groups of ranks meet in a replay with equally many rows, so all replay a step or none: where no sequence has an adapter or
        an image to compute, no group has more tokens than were captured, and all have places. Some groups may have no work."""
        most = max(sum(item.count for item in work) for work in groups)
        if not 0 < most <= self._sizes[-1] or not all(map(_is_plain, chain(*groups))):
            return 0
        sizes = self._tall_sizes if any(map(self._is_tall, groups)) else self._sizes
        size = sizes[bisect_left(sizes, most)]
        fit = (self._captured(size, work).fixed.fits(_counts(work), _contexts(work)) for work in groups)
        return size if all(fit) else 0

    def _captured(self, size: int, work: Sequence[SeqWork]) -> _Captured:
        return (self._tall if self._is_tall(work) else self._low)[size]

    def _is_tall(self, work: Sequence[SeqWork]) -> bool:
        if not self._tall_sizes:
            return False
        pieces = [item for item in work if item.count > 1 and item.is_prompt_piece]
        return sum(chunk_pairs(item.start, item.count) for item in pieces) > _MOST_PAIRS

    def pack(self, size: int, work: Sequence[SeqWork], seqs: Sequence[RankSeq], pack: Pack) -> "Replay":
        """Add to `pack` the inputs of one group's work, `padded` to `size`."""
        captured = self._captured(size, work)
        tables = [seq.block_table(item.block_ids) for item, seq in zip(work, seqs, strict=True)]
        tokens, positions, slots = packed_rows(work, seqs, self._block_size)
        num_rows = len(tokens)
        rows = np.zeros(captured.rows.shape, np.int64)
        rows[0, :num_rows], rows[1, :num_rows] = tokens, positions
        to_sample = sampled_rows(work)
        return Replay(
            captured=captured,
            pool=self._pool,
            marks=self._marks,
            num_rows=num_rows,
            rows=pack.add(rows),
            on_device=OnDevice.of(work, seqs, pack),
            fixed=[
                pack.add(one) for one in captured.fixed.inputs(_counts(work), _contexts(work), tables, slots)
            ],
            sample_rows=pack.add(np.array(to_sample, np.int64)) if len(to_sample) < num_rows else None,
        )


def _is_plain(item: SeqWork) -> bool:
    return not (item.adapter or item.has_image or item.both_ways)


def _counts(work: Sequence[SeqWork]) -> list[int]:
    return [item.count for item in work]


def _contexts(work: Sequence[SeqWork]) -> list[int]:
    return [item.start + item.count for item in work]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One step's. Call `hidden` when its pack is sent."""

    captured: _Captured
    pool: ResidentPool
    marks: LayerMarks | None
    num_rows: int
    rows: Placed
    on_device: OnDevice | None
    fixed: Sequence[Placed]
    sample_rows: Placed | None
    """None where all rows sample."""

    def hidden(
        self,
        step: StepIO,
        states: Tensor | None = None,
        layer_done: LayerDone | None = None,
        first_layer: int = 0,
    ) -> Tensor:
        """Return (N, hidden_size), a row for each token, which the next replay overwrites. All KV is written, and `layer_done`
        told of it, the pool's first layer being `first_layer`. `states` (N, hidden_size) are those of the stage before, where
        there is one."""
        captured = self.captured
        captured.rows.copy_(self.rows())
        if captured.states is not None:
            assert states is not None, "a stage before"
            captured.states[: self.num_rows].copy_(states)
        if self.on_device is not None:
            self.on_device.fill(captured.rows[0], step)
        captured.fixed.fill([each() for each in self.fixed])
        number = 0 if self.marks is None else self.marks.launches()
        out = captured.replay()[: self.num_rows]
        self.pool.written_in_all(captured.fixed.meta.slots[: self.num_rows])
        if layer_done is not None:
            num_layers = len(self.pool.layers)
            written = [None] * num_layers if self.marks is None else self.marks.events(number)
            for layer, after in enumerate(written, first_layer):
                layer_done(0, layer, after)
        return out

    def sampled(self, hidden: Tensor) -> Tensor:
        """Return the rows of `hidden` behind which a token is sampled."""
        return hidden if self.sample_rows is None else hidden.index_select(0, self.sample_rows())

"""Lets a step begin before its whole prefix is there. What comes from a lower tier is filled in layer by layer, on a thread. The
step waits for layer l's blocks only before layer l reads them.

Invariant: a block is known here from before any step can use it until all of its layers are filled."""

import threading
from collections.abc import Iterable, Sequence

from core.plan import StepPlan
from core.ports import DeviceWork, LayerDone, LayerSink


class Fill:
    """Blocks that are filled together. `done` is for the thread that fills them."""

    def __init__(self, blocks: Sequence[int], changed: threading.Condition) -> None:
        self.blocks, self._changed = blocks, changed
        self._num_layers = 0
        self.num_waiting = 0
        """The threads that wait for it."""
        self._error: Exception | None = None
        self._whole = False

    def done(self, layer: int) -> None:
        """Note that a layer is filled. Layers come in order."""
        with self._changed:
            self._num_layers = layer + 1
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        with self._changed:
            self._whole, self._error = error is None, error
            self._changed.notify_all()

    def wait(self, layer: int | None) -> None:
        """Block until `layer` is there; None means all layers. Raises what broke the filling."""
        with self._changed:
            self.num_waiting += 1
            self._changed.wait_for(lambda: self._error or self._whole or self._has(layer))
            self.num_waiting -= 1
            if self._error is not None:
                raise self._error

    def _has(self, layer: int | None) -> bool:
        return layer is not None and layer < self._num_layers


class LayerGate:
    """Which blocks are being filled. The event loop's thread writes it, and compute threads ask it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._fills: dict[int, Fill] = {}

    def begin(self, blocks: Sequence[int]) -> Fill:
        fill = Fill(blocks, self._changed)
        with self._changed:
            self._fills |= dict.fromkeys(blocks, fill)
        return fill

    @property
    def holds_a_step_up(self) -> bool:
        """Whether a compute thread waits for blocks."""
        return any(fill.num_waiting for fill in list(self._fills.values()))

    def end(self, fill: Fill) -> None:
        """End a fill: its blocks are like any others."""
        with self._changed:
            for block in fill.blocks:
                del self._fills[block]

    def fills_of(self, blocks: Iterable[int]) -> list[Fill]:
        if not self._fills:
            return []
        with self._changed:
            return list({id(f): f for block in blocks if (f := self._fills.get(block))}.values())


class GatedSink:
    """A core.ports.LayerSink before another one. Its callback for a layer waits for what that layer reads."""

    def __init__(self, gate: LayerGate, inner: LayerSink) -> None:
        self._gate, self._inner = gate, inner

    def step_started(self, plan: StepPlan) -> LayerDone | None:
        """Start the step. Blocks while a block that the step copies from, which it does at once, is being filled."""
        for fill in self._gate.fills_of(copy.src for copy in plan.copies):
            fill.wait(None)
        inner = self._inner.step_started(plan)
        fills = self._gate.fills_of(block for work in plan.work for block in work.block_ids)
        if not fills:
            return inner

        def layer_done(rank: int, layer: int, after: DeviceWork | None = None) -> None:
            for fill in fills:
                fill.wait(layer)
            if inner is not None:
                inner(rank, layer, after)

        return layer_done

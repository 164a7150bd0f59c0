"""One rank: executes a StepPlan on its model and its KV pool, synchronously and in order."""

import time
from collections.abc import Callable

import torch

from core.kv import num_blocks_for
from core.plan import StepPlan, StepResult
from core.ports import LayerDone, LayerSink
from engine.execution.batch import RankSeq, build_batch
from engine.execution.decode_graphs import DecodeGraphs
from engine.execution.draws import Draws
from engine.execution.kv_pool import DevicePool
from engine.execution.prompt_outputs import read_prompts
from models.causal_model import CausalModel


class Runner:
    def __init__(
        self,
        model: CausalModel,
        pool: DevicePool,
        block_size: int,
        sink: LayerSink | None = None,
        graphs: DecodeGraphs | None = None,
        *,
        draws: Draws | None = None,
        num_state_blocks: int = 0,
    ) -> None:
        """`graphs` and `draws` are of the same model. Without `draws` no sequence can have a grammar. `num_state_blocks`: each
        sequence's first blocks, which have its recurrent state."""
        self._model, self._pool, self._block_size, self._sink = model, pool, block_size, sink
        self._graphs, self._draws = graphs, draws or Draws(model)
        self._num_state_blocks = num_state_blocks
        self._device = pool.device
        self._seqs: dict[str, RankSeq] = {}

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Execute a plan. Returns when every KV write of the step is in the pool and its tokens are drawn."""
        started = time.perf_counter()
        self._draws.begin(plan)
        layer_done = begin_step(
            plan, self._seqs, self._pool, self._block_size, self._sink, self._num_state_blocks
        )
        seqs = [self._seqs[item.key] for item in plan.work]
        graphs = self._graphs
        if graphs is not None and layer_done is None and graphs.fit(plan.work):
            hidden, replayed = graphs.hidden(plan.work, seqs), True
            read_prompts(self._model, hidden, plan.work, seqs)
            if not all(item.samples for item in plan.work):
                hidden = hidden[[row for row, item in enumerate(plan.work) if item.samples]]
        else:
            hidden, replayed = self._forward(plan, seqs, layer_done), False
        sampled = self._draws.draw(hidden, plan.work, seqs)
        self._pool.finish()
        return StepResult(
            step=plan.step,
            sampled=sampled,
            duration_s=time.perf_counter() - started,
            replayed=replayed,
        )

    def _forward(self, plan: StepPlan, seqs: list[RankSeq], layer_done: LayerDone | None) -> torch.Tensor:
        """Return (N, hidden_size): the rows behind which a token is drawn."""
        batch = build_batch(plan.work, seqs, self._block_size, self._device, self._num_state_blocks)
        on_layer = layer_hook(self._pool, batch.written(self._block_size), layer_done)
        hidden = self._model.forward(batch.tokens, batch.positions, self._pool.layers, batch.meta, on_layer)
        read_prompts(self._model, hidden, plan.work, seqs)
        return hidden[batch.sample_rows]


def begin_step(
    plan: StepPlan,
    seqs: dict[str, RankSeq],
    pool: DevicePool,
    block_size: int,
    sink: LayerSink | None,
    num_state_blocks: int = 0,
) -> LayerDone | None:
    """Let sequences leave and come, and bring the blocks into the state that the step expects. Returns whom to tell of the step's
    layers, if anybody waits for them."""
    for key in plan.drop:
        seqs.pop(key, None)
    for new in plan.new:
        seqs[new.key] = RankSeq(new)
    for item in plan.work:
        if item.drafts:
            seqs[item.key].guess(item)
    layer_done = sink.step_started(plan) if sink is not None else None
    pool.begin(plan)
    pool.copy_blocks(plan.copies)
    _take_in(pool, plan, block_size, num_state_blocks)
    return layer_done


def layer_hook(
    pool: DevicePool, slots: torch.Tensor, layer_done: LayerDone | None, first_layer: int = 0
) -> Callable[[int], None] | None:
    """Return a hook to be called with each layer of the model when its KV of the tokens at `slots` is computed. `first_layer` is
    the pool's first."""
    if not pool.is_told:
        return None if layer_done is None else lambda layer: layer_done(0, layer)

    def written(layer: int) -> None:
        pool.written(layer - first_layer, slots)
        if layer_done is not None:
            pool.hand_over()
            layer_done(0, layer)

    return written


def _take_in(pool: DevicePool, plan: StepPlan, block_size: int, num_state_blocks: int) -> None:
    """Take in what others may have computed of the new sequences' KV."""
    if not pool.is_told:
        return
    new = {seq.key for seq in plan.new}
    known = [
        item.block_ids[: num_state_blocks + num_blocks_for(item.start, block_size)]
        for item in plan.work
        if item.key in new and item.start
    ]
    if blocks := [block for ids in known for block in ids]:
        pool.arrived(torch.tensor(blocks, dtype=torch.int64))

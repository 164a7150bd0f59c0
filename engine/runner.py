"""One rank: executes a StepPlan on its model and its KV pool, synchronously and in order."""

import time

import torch

from core.plan import Sampled, StepPlan, StepResult
from core.ports import LayerSink
from engine.batch import RankSeq, build_batch
from engine.kvpool import KVPool
from engine.sampler import sample
from models.model import Model


class Runner:
    def __init__(self, model: Model, pool: KVPool, block_size: int, sink: LayerSink | None = None) -> None:
        self._model, self._pool, self._block_size, self._sink = model, pool, block_size, sink
        self._device = pool.layers[0].device
        self._seqs: dict[str, RankSeq] = {}

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Returns when every KV write of the step is in the pool and its tokens are drawn."""
        started = time.perf_counter()
        for key in plan.drop:
            self._seqs.pop(key, None)
        for new in plan.new:
            self._seqs[new.key] = RankSeq(new)
        self._pool.copy_blocks(plan.copies)
        seqs = [self._seqs[item.key] for item in plan.work]
        batch = build_batch(plan.work, seqs, self._block_size, self._device)
        hidden = self._model.forward(
            batch.tokens, batch.positions, self._pool.layers, batch.meta, self._layer_hook(plan)
        )
        sampled = self._sample(plan, seqs, hidden[batch.sample_rows])
        return StepResult(plan.step, tuple(sampled), time.perf_counter() - started)

    def _layer_hook(self, plan: StepPlan):
        if self._sink is None or not any(item.push for item in plan.work):
            return None
        layer_done = self._sink.step_started(plan)
        return lambda layer: layer_done(0, layer)

    def _sample(self, plan: StepPlan, seqs: list[RankSeq], hidden: torch.Tensor) -> list[Sampled]:
        chosen = [(item.key, seq) for item, seq in zip(plan.work, seqs, strict=True) if item.samples]
        if not chosen:
            return []
        out = sample(self._model.logits(hidden), [key for key, _ in chosen], [seq for _, seq in chosen])
        for (_, seq), drawn in zip(chosen, out, strict=True):
            seq.append(drawn.token)
        return out

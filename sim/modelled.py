"""The ranks of an instance without a device: steps take modelled time and sample tokens that depend on (seed, position) alone."""

import asyncio
import hashlib

from core.config.adapter_config import HoldAdapters
from core.errors import Hung
from core.plan import NewSeq, Sampled, StepPlan, StepResult
from core.ports import Clock, LayerSink, OnReady
from sim.catalogue.cost import ModelledStep, duration_s


def modelled_token(seed: int, position: int, vocab_size: int) -> int:
    """Return the token at an absolute position of a sequence. It is never 0, which workloads use as their end-of-sequence id."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % (vocab_size - 1)


class ModelledGroup:
    """core.ports.WorkerGroup. Layers finish evenly over a step, and the sink hears of each, as from a real rank."""

    def __init__(
        self, clock: Clock, cost: ModelledStep, num_layers: int, vocab_size: int, sink: LayerSink | None
    ) -> None:
        self._clock, self._cost, self._num_layers, self._vocab_size = clock, cost, num_layers, vocab_size
        self._sink = sink
        self._seqs: dict[str, NewSeq] = {}
        self._busy = asyncio.Lock()

    async def execute(self, plan: StepPlan) -> StepResult:
        async with self._busy:  # fair: steps run in the order of the calls
            for key in plan.drop:
                self._seqs.pop(key, None)
            for seq in plan.new:
                self._seqs[seq.key] = seq
            step_s = duration_s(self._cost, plan)
            await self._run_layers(plan, step_s)
            sampled = tuple(
                self._sample(work.key, work.start + work.count) for work in plan.work if work.samples
            )
            return StepResult(step=plan.step, sampled=sampled, duration_s=step_s)

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        return {}

    def on_ready(self, hear: OnReady) -> None:
        """No sample is put off here."""

    async def lost(self) -> Exception:
        return await asyncio.get_running_loop().create_future()

    async def give_up(self, why: str) -> Hung:
        return Hung(why)

    async def close(self) -> None:
        self._seqs.clear()

    async def _run_layers(self, plan: StepPlan, step_s: float) -> None:
        layer_done = self._sink.step_started(plan) if self._sink is not None else None
        if layer_done is None:
            await self._clock.sleep(step_s)
            return
        for layer in range(self._num_layers):
            await self._clock.sleep(step_s / self._num_layers)
            layer_done(0, layer)

    def _sample(self, key: str, position: int) -> Sampled:
        return Sampled(key, modelled_token(self._seqs[key].sampling.seed or 0, position, self._vocab_size))

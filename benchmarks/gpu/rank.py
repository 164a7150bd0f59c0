"""A rank of a shape, alone: its model with made-up weights, its KV pool, and plans of steps for it."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from benchmarks.gpu.shapes import DTYPE, Shape, model_of
from cluster.instance.device_access import take_device_memory
from core.garbage import leave_out_all_there_is
from core.kv import KVShard, num_blocks_for
from core.plan import NewSeq, SeqWork, StepPlan, StepResult
from core.types import SamplingParams
from device.cuda import CudaDevice
from device.poller import Poller
from device.port import PoolMemory
from device.simulated import SimulatedDevice
from engine.execution.batch.step_memory import NUM_STEPS, StepMemory
from engine.execution.graphs.step_graphs import StepGraphs
from engine.execution.pools.resident_pool import ResidentPool
from engine.execution.runner import LaunchedStep, Runner
from kernels.ops import ScaledKV
from kernels.triton.platform import INTERPRETED
from models.model import Model

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Rank:
    model: Model
    pool: ResidentPool
    memory: PoolMemory
    """What the pool lies in."""

    @classmethod
    def of(cls, shape: Shape, num_tokens: int, device: torch.device) -> "Rank":
        """Its pool holds `num_tokens` tokens, in whole blocks, of made-up KV: zeros are read faster than anything else."""
        model = model_of(shape, device)
        shard = KVShard.whole(model.spec.kv_layout(BLOCK_SIZE, str(DTYPE).removeprefix("torch.")))
        num_blocks = num_blocks_for(num_tokens, BLOCK_SIZE)
        own = SimulatedDevice(seed=num_blocks) if INTERPRETED else CudaDevice(0)
        memory = take_device_memory(own, shard.pool_bytes(num_blocks + 1))
        pool = ResidentPool(shard, num_blocks + 1, memory, device)
        for layer in pool.layers:
            assert not isinstance(layer, ScaledKV)
            layer.normal_()
        leave_out_all_there_is()  # as a rank's process does
        return cls(model, pool, memory)

    def runner(self, max_rows: int, graphs: StepGraphs | None = None) -> Runner:
        """`max_rows`: the most tokens that a step samples."""
        steps = StepMemory(self.memory.device, self.pool.device, max_rows)
        return Runner(self.model, self.pool, BLOCK_SIZE, graphs=graphs, steps=steps)


class Launching(Protocol):
    """What a `Runner` does in two halves."""

    def launch(self, plan: StepPlan) -> LaunchedStep: ...

    def finish(self, launched: LaunchedStep) -> StepResult: ...


def ahead(runner: Launching, plans: Iterable[StepPlan]) -> Iterator[tuple[float, StepResult]]:
    """Launch each step behind the one that computes, as an instance does. Yields when each is over, and its result."""
    poller, flight = Poller(), deque[LaunchedStep]()

    def over() -> tuple[float, StepResult]:
        launched = flight.popleft()
        poller.wait([launched.over])
        at = time.perf_counter()
        return at, runner.finish(launched)

    for plan in plans:
        flight.append(runner.launch(plan))
        if len(flight) == NUM_STEPS:
            yield over()
    while flight:
        yield over()


def decode_plans(batch: int, context: int, num_steps: int) -> Iterator[StepPlan]:
    """Steps of `batch` sequences, whose contexts are `context` tokens in the first one and grow. Blocks are theirs alone, and
    there are enough for `num_steps` more tokens each."""
    blocks = num_blocks_for(context + num_steps, BLOCK_SIZE)
    sampling = SamplingParams(temperature=0.0, max_tokens=4096)
    keys = [str(number) for number in range(batch)]
    ids = [tuple(range(number * blocks, (number + 1) * blocks)) for number in range(batch)]
    new = tuple(NewSeq(key, (2,) * context, context, sampling) for key in keys)
    for step in range(num_steps):
        work = tuple(
            SeqWork(
                key=key,
                start=context - 1 + step,
                count=1,
                block_ids=ids[number],
                samples=True,
            )
            for number, key in enumerate(keys)
        )
        yield StepPlan(step=step, new=() if step else new, copies=(), work=work, drop=())


def prefill_plan(step: int, tokens: int) -> StepPlan:
    """A prompt of `tokens` tokens, whole. Each step's is another one in the same blocks."""
    sampling, key = SamplingParams(temperature=0.0, max_tokens=4096), str(step)
    blocks = tuple(range(num_blocks_for(tokens, BLOCK_SIZE)))
    work = SeqWork(key=key, start=0, count=tokens, block_ids=blocks, samples=True)
    drop = (str(step - 1),) if step else ()
    return StepPlan(
        step=step, new=(NewSeq(key, (2,) * tokens, tokens, sampling),), copies=(), work=(work,), drop=drop
    )

"""A rank of a shape, alone: its model with made-up weights, its KV pool, and plans of steps for it."""

import mmap
from dataclasses import dataclass

import torch

from benchmarks.gpu.shapes import DTYPE, Shape, model_of
from core.kv import KVShard, num_blocks_for
from core.plan import NewSeq, SeqWork, StepPlan
from core.types import SamplingParams
from engine.execution.mirrored_pool import MirroredPool
from models.model import Model

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Rank:
    model: Model
    pool: MirroredPool

    @classmethod
    def of(cls, shape: Shape, num_tokens: int, device: torch.device) -> "Rank":
        """Its pool holds `num_tokens` tokens, in whole blocks."""
        model = model_of(shape, device)
        shard = KVShard.whole(model.spec.kv_layout(BLOCK_SIZE, str(DTYPE).removeprefix("torch.")))
        num_blocks = num_blocks_for(num_tokens, BLOCK_SIZE)
        buffer = memoryview(mmap.mmap(-1, shard.pool_bytes(num_blocks)))
        return cls(model, MirroredPool(shard, num_blocks, buffer, device))


def decode_plan(step: int, batch: int, context: int, known: bool) -> StepPlan:
    """The last token of `batch` contexts of `context` tokens. `known`: a step before has had the same sequences."""
    return _plan(step, batch, context, start=context - 1, known=known)


def prefill_plan(step: int, tokens: int) -> StepPlan:
    """A prompt of `tokens` tokens, whole. Each step's is another one in the same blocks."""
    return _plan(step, 1, tokens, start=0, known=False)


def _plan(step: int, batch: int, context: int, *, start: int, known: bool) -> StepPlan:
    blocks = num_blocks_for(context, BLOCK_SIZE)
    sampling = SamplingParams(temperature=0.0, max_tokens=4096)
    keys = [f"{i}" if start else f"{step}" for i in range(batch)]
    new = () if known else tuple(NewSeq(key, (2,) * context, context, sampling) for key in keys)
    work = tuple(
        SeqWork(
            key=key,
            start=start,
            count=context - start,
            block_ids=tuple(range(i * blocks, (i + 1) * blocks)),
            samples=True,
        )
        for i, key in enumerate(keys)
    )
    drop = () if start or not step else (f"{step - 1}",)
    return StepPlan(step=step, new=new, copies=(), work=work, drop=drop)

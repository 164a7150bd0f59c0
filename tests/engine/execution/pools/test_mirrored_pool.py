"""A pool whose host memory is a copy: the same tokens, the copy always whole, and what others have put there is seen."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.kv import KVShard
from core.plan import NewSeq, SeqWork, StepPlan
from core.types import Request, SamplingParams
from engine.execution.pools.kv_pool import DevicePool, KVPool, bytes_of, pool_parts
from engine.execution.pools.mirrored_pool import MirroredPool
from engine.execution.runner import Runner
from models.registry import load_model
from tests.engine.execution.test_runner import Instance, prompts
from tests.models.checkpoints import CPU, FAMILIES, make

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12, masked_until_min=(1,))


def stack(pool: DevicePool) -> torch.Tensor:
    return torch.stack([layer for layer in pool.layers if isinstance(layer, torch.Tensor)])


def test_a_mirrored_pool_gives_the_same_tokens_and_its_copy_is_whole(tmp_path: Path) -> None:
    rng = random.Random(3)
    make(tmp_path, FAMILIES["llama"](rng, 0), seed=1)
    model = load_model(tmp_path, "float32", CPU)
    requests = [
        Request(id=str(i), prompt=text, sampling=GREEDY, reply_to="f") for i, text in enumerate(prompts(rng))
    ]
    copies = 0
    for num_blocks in (200, 17):
        plain = Instance(model, num_blocks, max_batch_tokens=5)
        mirrored = Instance(model, num_blocks, mirrored=True, max_batch_tokens=5)
        for _ in range(2):
            assert mirrored.run(requests) == plain.run(requests)
        copies += mirrored.num_copies
        shard = KVShard.whole(model.spec.kv_layout(4, "float32"))
        (host,) = pool_parts(shard, num_blocks, bytes_of(shard, num_blocks, mirrored.buffer))
        written = ~host.isnan()
        assert written.any()
        assert torch.equal(host[written], stack(mirrored.pool)[:, :num_blocks][written])
    assert copies > 0


def _step(start: int, count: int, tokens: tuple[int, ...]) -> StepPlan:
    new = NewSeq("a", tokens, len(tokens), GREEDY)
    return StepPlan(
        step=0,
        new=(new,),
        copies=(),
        work=(SeqWork(key="a", start=start, count=count, block_ids=(3, 1, 2), samples=True),),
        drop=(),
    )


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn"])
def test_blocks_that_others_have_filled_are_read(kv_dtype: str, tmp_path: Path) -> None:
    rng = random.Random(4)
    make(tmp_path, FAMILIES["llama"](rng, 0), seed=1)
    model = load_model(tmp_path, "float32", CPU)
    scales = "none" if kv_dtype == "float32" else "vector"
    shard = KVShard.whole(replace(model.spec.kv_layout(4, "float32"), dtype=kv_dtype, scales=scales))
    tokens = tuple(range(2, 12))
    buffers = [memoryview(bytearray(shard.pool_bytes(5))) for _ in range(2)]
    there = Runner(model, KVPool(shard, 5, buffers[0]), 4).step(_step(0, 10, tokens))
    pool = MirroredPool(shard, 5, buffers[1], CPU)
    buffers[1][:] = buffers[0]
    here = Runner(model, pool, 4).step(_step(9, 1, tokens))
    assert here.sampled == there.sampled

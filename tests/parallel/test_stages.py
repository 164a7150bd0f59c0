"""Stages on processes of their own execute what the scheduler plans for a model with recurrent layers: tokens are transformers' own."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.config.cluster_config import EngineConfig
from core.kv import KVShard
from core.plan import BlockCopy, Sampled, SampledToken, SeqWork, StepPlan, StepResult
from core.types import Request, SamplingParams
from engine.execution.pools.kv_pool import KVPool
from engine.execution.sampling.step_sampling import StepSampler
from engine.planning.speculation.speculator import Speculator
from engine.planning.step_scheduler import StepScheduler
from engine.ranks.model_part import load_part
from engine.ranks.pipeline_stage import StageRunner
from engine.sizing.model_dims import shards_of
from models.families.table import read_spec
from models.registry import LoadOptions
from parallel.mesh import Mesh
from tests.engine.execution.drafting.test_speculation import Adversary
from tests.engine.fifo_policy import FifoPolicy
from tests.models.checkpoints import BLOCK, CPU, HYBRID, VOCAB, make
from tests.models.continuation import continuation
from tests.parallel.families import awkward
from tests.parallel.world import World

pytestmark = pytest.mark.turns(3)


class ToldPool(KVPool):
    """Keeps beside it what it is told of."""

    is_told = True

    def __init__(self, shard: KVShard, num_blocks: int, nothing: bytes) -> None:
        super().__init__(shard, num_blocks, memoryview(bytearray(nothing)))
        self.told = KVPool(shard, num_blocks, memoryview(bytearray(nothing)))
        self._block_size = shard.layout.block_size

    def written(self, layer: int, slots: Tensor) -> None:
        block, offset = slots // self._block_size, slots % self._block_size
        told, own = self.told.layers[layer], self.layers[layer]
        assert isinstance(told, Tensor)
        assert isinstance(own, Tensor)
        told[block, :, :, offset] = own[block, :, :, offset]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        super().copy_blocks(copies)
        self.told.copy_blocks(copies)


LENGTH = 10
SAMPLING = SamplingParams(temperature=0.0, max_tokens=LENGTH, min_tokens=LENGTH, masked_until_min=(1,))


def plans_of(
    scheduler: StepScheduler, waves: list[list[Request]], truth: dict[str, list[int]]
) -> list[StepPlan]:
    """What is planned, one step ahead, where this is sampled. The last step lets every token arrive."""
    num_said = dict.fromkeys(truth, 0)

    def sampled_by(work: SeqWork) -> Sampled:
        rest = truth[work.key][num_said[work.key] :]
        right = 0
        while right < len(work.drafts) and work.drafts[right] == rest[right]:
            right += 1
        num_said[work.key] += right + 1
        return Sampled(work.key, rest[0], more=tuple(SampledToken(token) for token in rest[1 : right + 1]))

    plans: list[StepPlan] = []
    flight: list[StepPlan] = []
    for wave in waves:
        for request in wave:
            scheduler.sequences.add(request)
        while True:
            while len(flight) < 2 and (plan := scheduler.plan(0.0)):
                flight.append(plan)
            if not flight:
                break
            plans.append(flight.pop(0))
            sampled = tuple(sampled_by(work) for work in plans[-1].work if work.samples)
            scheduler.commit(plans[-1], StepResult(step=plans[-1].step, sampled=sampled), 0.0)
    return [*plans, StepPlan(step=plans[-1].step + 2, new=(), copies=(), work=(), drop=())]


def greedily(reference: Any, prompt: tuple[int, ...]) -> list[int]:
    tokens = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=LENGTH,
        suppress_tokens=[1],
        do_sample=False,
        pad_token_id=0,
    )
    return tokens[0, len(prompt) :].tolist()


def executed(
    rank: int, store: Any, mesh: Mesh, folder: Path, plans: list[StepPlan], num_blocks: int
) -> tuple[list[tuple[str, int]], bool]:
    """What the stage samples, and whether it has told the pool of all that it wrote."""
    part = load_part(
        folder,
        "float32",
        CPU,
        mesh,
        rank=rank,
        store=store,
        options=LoadOptions(kernels="torch", block_size=BLOCK),
    )
    spec = part.model.spec
    shard = shards_of(spec, mesh, spec.kv_layout(BLOCK, "float32"))[rank]
    pool = ToldPool(shard, num_blocks, b"\xff" * shard.pool_bytes(num_blocks))  # NaN
    stage = StageRunner(part.model, pool, shard, part.comms.pp, mesh.pp, sampler=StepSampler(part.model))
    results = [stage.step(plan) for plan in plans]
    sampled = [(one.key, token) for result in results for one in result.sampled for token in one.tokens]
    part.comms.close()
    return sampled, all(
        isinstance(told, Tensor)
        and isinstance(layer, Tensor)
        and torch.allclose(told, layer, rtol=0.0, atol=0.0, equal_nan=True)
        for told, layer in zip(pool.told.layers, pool.layers, strict=True)
    )


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("family", HYBRID)
def test_states_stay_with_their_stages_through_chunks_draft_tokens_and_checkpoints(
    family: str, mesh: Mesh, tmp_path: Path, world: World
) -> None:
    rng = random.Random(family)
    reference = make(tmp_path, awkward(family), seed=1)
    shared = [rng.randrange(2, VOCAB) for _ in range(25)]
    texts = [(*shared, *(rng.randrange(2, VOCAB) for _ in range(count))) for count in (12, 7, 9, 4)]
    first, second, *others = (
        Request(id=str(i), prompt=text, sampling=SAMPLING, reply_to="f") for i, text in enumerate(texts)
    )
    states = read_spec(tmp_path).kv_layout(BLOCK, "float32").state_blocks
    num_blocks = 14 * states + 200
    config = EngineConfig(block_size=BLOCK, max_batch_tokens=16)
    truth = {request.key: greedily(reference, request.prompt) for request in (first, second, *others)}
    drafts = Adversary({key.partition("#")[0]: said for key, said in truth.items()}, rng)
    scheduler = StepScheduler(
        config,
        num_blocks,
        128,
        FifoPolicy(),
        speculator=Speculator(drafts, config, 128),
        num_state_blocks=states,
    )
    plans = plans_of(scheduler, [[first], [second], others], truth)
    assert scheduler.load().prefix_tokens[1] > 0, "no prompt goes on from a checkpoint"
    proposed, right = scheduler.load().draft_tokens
    assert proposed > right > 0
    answers = world.run(mesh.size, executed, mesh, tmp_path, plans, num_blocks)
    for rank, (sampled, has_told) in enumerate(answers):
        assert has_told
        said: dict[str, list[int]] = {}
        for key, token in sampled:
            said.setdefault(key, []).append(token)
        if mesh.place(rank).pp < mesh.pp - 1:
            assert not said
            continue
        for request in (first, second, *others):
            own = said[request.key]
            assert own == continuation(reference, request.prompt, own, LENGTH, barred=[1])

"""The real runner and scheduler on tiny models: what transformers says, whatever the pool, the chunks and the batch."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from core.config.cluster_config import EngineConfig
from core.kv import KVLayout, KVShard
from core.messages import Grant
from core.plan import StepPlan, StepResult
from core.ports import DeviceWork, LayerDone
from core.types import Request, SamplingParams, TokenOut
from device.poller import Poller
from device.port import PoolMemory
from device.simulated import SimulatedDevice
from engine.execution.drafting.draft_head import DraftHead
from engine.execution.drafting.draft_kv import draft_layers
from engine.execution.drafting.draft_model import DraftModel
from engine.execution.drafting.proposing import Proposer, Proposing
from engine.execution.graphs.graph_capture import again
from engine.execution.graphs.step_graphs import StepGraphs
from engine.execution.pools.kv_pool import KVPool
from engine.execution.pools.resident_pool import ResidentPool
from engine.execution.runner import Runner
from engine.planning.speculation.drafter import Drafter
from engine.planning.speculation.speculator import Speculator, make_speculator
from engine.planning.step_scheduler import StepScheduler
from kernels.kv_parts import ScaledKV, ScaledLatents
from models.causal_model import CausalModel
from models.drafting.drafting_head import DraftingHead
from models.registry import load_model
from tests.engine.fifo_policy import FifoPolicy
from tests.models.checkpoints import CPU, FAMILIES, VOCAB, make
from tests.models.continuation import continuation


class Sink:
    def __init__(self) -> None:
        self.heard: list[object] = []
        self.events: list[DeviceWork | None] = []
        """What says of each layer that it is written."""

    def step_started(self, plan: StepPlan) -> LayerDone | None:
        if not any(work.push for work in plan.work):
            return None
        self.heard.append(plan.step)

        def layer_done(rank: int, layer: int, after: DeviceWork | None = None) -> None:
            self.heard.append(f"layer {layer}")
            self.events.append(after)

        return layer_done


def resident_pool(shard: KVShard, num_blocks: int, device: SimulatedDevice) -> ResidentPool:
    """Make one that is full of NaN, which must never be read, but for the block that is nobody's."""
    memory = PoolMemory(device, device.allocate(shard.pool_bytes(num_blocks + 1)), Poller())
    np.asarray(device.array(memory.region))[:] = 0xFF
    pool = ResidentPool(shard, num_blocks + 1, memory, CPU)
    for layer in pool.layers:
        parts = [layer] if isinstance(layer, torch.Tensor) else [layer.data]
        parts += [layer.scales] if isinstance(layer, ScaledKV | ScaledLatents) else []
        for part in parts:
            part[pool.empty_block] = torch.zeros_like(part[pool.empty_block])
    return pool


class Instance:
    def __init__(
        self, model: CausalModel, num_blocks: int = 200, depth: int = 2, sink: Sink | None = None, *,
        simulated: bool = False, kv_dtype: str = "", sizes: tuple[int, ...] = (), drafter: Drafter | None = None,
        draft: CausalModel | None = None, head: DraftingHead | None = None,
        head_layout: KVLayout | None = None, **config: object,
    ) -> None:  # fmt: skip
        """`simulated`: on a device with memory of its own, where `sizes` of decode steps may be captured. `drafter`: in place of
        the configuration's. `draft` and `head`: of `speculate="draft:..."`, and of `"mtp"` or an EAGLE-3 head, whose
        KV is laid out as `head_layout` says, or as the model's."""
        settings = EngineConfig(**{"block_size": 4, **config})  # type: ignore[arg-type]
        layout = model.spec.kv_layout(settings.block_size, "float32")
        shard = KVShard.whole(replace(layout, dtype=kv_dtype, scales="vector") if kv_dtype else layout)
        buffer = memoryview(bytearray(b"\xff" * shard.pool_bytes(num_blocks)))  # NaN: must never be read
        self.device = SimulatedDevice(seed=num_blocks)
        pool = (
            resident_pool(shard, num_blocks, self.device) if simulated else KVPool(shard, num_blocks, buffer)
        )
        self.pool = pool
        graphs = None
        if sizes:
            assert isinstance(pool, ResidentPool)
            marks = pool.layer_marks() if sink is not None else None
            graphs = StepGraphs(
                model,
                pool,
                settings.block_size,
                128 // settings.block_size,
                sizes,
                again,
                max_seqs=settings.max_num_seqs,
                marks=marks,
            )
        self.num_replayed = 0
        self.num_states = num_states = layout.state_blocks
        self.proposer: Proposer | None = None
        self.run_step: Callable[[StepPlan], StepResult] = self.verify
        if draft is not None:
            shape = KVShard.whole(draft.spec.kv_layout(settings.block_size, "float32"))
            layers = draft_layers(shape, num_blocks, CPU)
            self.draft_by(DraftModel(draft, layers, settings.block_size, model.spec.vocab_size))
        elif head is not None:
            shape = KVShard.whole(replace(head_layout or layout, num_layers=1))
            self.draft_by(DraftHead(head, shape, num_blocks))
        self.runner = Runner(
            model,
            pool,
            settings.block_size,
            sink,
            graphs,
            num_state_blocks=num_states,
            on_hidden=self.hear,
        )
        self.on_step: Callable[[StepPlan], None] = lambda plan: None
        """Hears of each plan with its draft tokens."""
        speculator = Speculator(drafter, settings, 128) if drafter else make_speculator(settings, 128)
        self.scheduler = StepScheduler(
            settings,
            num_blocks,
            128,
            FifoPolicy(),
            speculator=speculator,
            num_state_blocks=num_states,
        )
        self.depth = depth
        self.said: dict[str, list[TokenOut]] = {}
        self.num_announced = self.num_copies = 0

    def draft_by(self, proposer: Proposer) -> None:
        self.proposer, self.run_step = proposer, Proposing(self.verify, proposer, self.num_states).step

    def hear(self, hidden: torch.Tensor) -> None:
        if self.proposer is not None:
            self.proposer.hear(hidden)

    def verify(self, plan: StepPlan) -> StepResult:
        self.on_step(plan)
        return self.runner.step(plan)

    def step(self, plan: StepPlan) -> StepResult:
        result = self.run_step(plan)
        self.num_replayed += result.replayed
        return result

    def run(self, requests: list[Request]) -> dict[str, list[int]]:
        for request in requests:
            self.scheduler.sequences.add(request)
        out: dict[str, list[int]] = {request.id: [] for request in requests}
        flight: list[StepPlan] = []
        while True:
            while len(flight) < self.depth and (plan := self.scheduler.plan(0.0)):
                flight.append(plan)
                self.num_announced += len(plan.new)
                self.num_copies += len(plan.copies)
            if not flight:
                break
            for token in self.scheduler.commit(flight[0], self.step(flight.pop(0)), 0.0):
                out[token.request_id].append(token.token)
                self.said.setdefault(token.request_id, []).append(token)
            self.scheduler.check_integrity()
        assert self.scheduler.load().num_used_blocks == 0
        return out


def prompts(rng: random.Random) -> list[tuple[int, ...]]:
    """Some share prefixes that end inside a block."""
    shared = [rng.randrange(2, VOCAB) for _ in range(18)]
    lengths = (18, 13, 7, 0, 18, 0)
    return [(*shared[:n], *(rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 15)))) for n in lengths]


ALL_WAYS = [*product((1, 5, 64), (1, 2))]
"""The most tokens of a step, and the steps in flight."""


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("llama", ALL_WAYS),
        ("gemma2", ALL_WAYS[1::2]),
        pytest.param("gemma4", [(1, 2), (5, 1), (64, 2)], marks=pytest.mark.slow),
        ("gemma4_small", [(5, 2)]),
        ("qwen3_moe", [(5, 2)]),
        ("deepseek_v3", [(5, 2)]),
        ("glm_moe_dsa", [(5, 2)]),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_greedy_equals_transformers_whatever_the_pool_the_chunks_and_the_cache(
    family: str, ways: list[tuple[int, int]], tmp_path: Path
) -> None:
    rng = random.Random(family)
    reference = make(tmp_path, FAMILIES[family](rng, 0), seed=1)
    model = load_model(tmp_path, "float32", CPU)
    texts, length = prompts(rng), 20
    sampling = SamplingParams(temperature=0.0, max_tokens=length, min_tokens=length, masked_until_min=(1,))
    requests = [
        Request(id=str(i), prompt=text, sampling=sampling, reply_to="f") for i, text in enumerate(texts)
    ]
    want: dict[str, list[int]] = {}
    num_preempted = num_copies = 0
    for num_blocks, (budget, depth), cache in product((200, 17), ways, (True, False)):
        instance = Instance(model, num_blocks, depth, max_batch_tokens=budget, prefix_cache=cache)
        got = instance.run(requests)
        want = want or {
            id: continuation(reference, texts[int(id)], said, length, barred=[1]) for id, said in got.items()
        }
        assert got == want, (num_blocks, budget, cache, depth)
        num_preempted += instance.num_announced - len(requests)
        num_copies += instance.num_copies
        if cache:
            assert instance.run(requests) == want
    assert num_preempted > len({budget for budget, _ in ways})
    assert num_copies > len({budget for budget, _ in ways})


def test_seeded_sampling_is_the_same_in_any_company(tmp_path: Path) -> None:
    rng = random.Random(5)
    make(tmp_path, FAMILIES["llama"](rng, 0), seed=2)
    model = load_model(tmp_path, "float32", CPU)
    requests = [
        Request(
            id=str(i),
            prompt=text,
            sampling=SamplingParams(
                temperature=0.9,
                top_p=rng.choice((1.0, 0.8)),
                top_k=rng.choice((0, 9)),
                repetition_penalty=rng.choice((1.0, 1.2)),
                seed=i,
                max_tokens=15,
            ),
            reply_to="f",
        )
        for i, text in enumerate(prompts(rng))
    ]
    alone = {request.id: Instance(model).run([request])[request.id] for request in requests}
    assert Instance(model).run(requests) == alone
    assert Instance(model, num_blocks=14, max_batch_tokens=5).run(requests[::-1]) == alone
    retried = [request.retry(tuple(alone[request.id][:6])) for request in requests]
    assert Instance(model).run(retried) == {id: tokens[6:] for id, tokens in alone.items()}


def test_the_sink_hears_of_each_layer_of_the_steps_that_it_wants_to_hear_of(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["llama"](random.Random(6), 0), seed=3)
    model = load_model(tmp_path, "float32", CPU)
    sink = Sink()
    instance = Instance(model, sink=sink, max_batch_tokens=8)
    instance.run(
        [
            Request(
                id="quiet",
                prompt=(2, 3, 4),
                sampling=SamplingParams(temperature=0.0, max_tokens=2),
                reply_to="f",
            )
        ]
    )
    assert sink.heard == []
    request = Request(
        id="p",
        prompt=tuple(range(2, 14)),
        sampling=SamplingParams(temperature=0.0, max_tokens=9),
        reply_to="f",
    )
    instance.scheduler.sequences.add(
        request,
        Grant(
            id="g",
            key=request.key,
            epoch=0,
            holder="d",
            incarnation="i",
            regions=(),
            block_ids=(),
            first_token=0,
            num_tokens=12,
            ttl_s=1.0,
        ),
    )
    steps: list[object] = []
    while plan := instance.scheduler.plan(0.0):
        steps += [plan.step, *(f"layer {i}" for i in range(model.spec.num_layers))]
        for token in instance.scheduler.commit(plan, instance.step(plan), 0.0):
            instance.scheduler.sequences.hold(token.key)
    assert sink.heard == steps
    assert len(steps) == 2 * (1 + model.spec.num_layers)
    instance.scheduler.reservations.release(request.key)
    assert instance.scheduler.load().num_used_blocks == 0

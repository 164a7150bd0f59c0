"""engine.deterministic: bitwise the same logits for a request, alone or in any batch, however its prompt is chunked, whether its
prefix was computed or cached, before and after it was preempted. Greedy tokens are those of the ordinary operations."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.config.cluster_config import EngineConfig
from core.kv import KVShard
from core.plan import StepPlan, StepResult
from core.types import Request, SamplingParams
from engine.execution.pools.kv_pool import KVPool
from engine.execution.runner import Runner
from engine.planning.step_scheduler import StepScheduler
from models.model import Model
from models.registry import LoadOptions, load_model
from tests.engine.fifo_policy import FifoPolicy
from tests.models.checkpoints import CPU, FAMILIES, VOCAB, make

Logits = dict[tuple[str, int], torch.Tensor]
"""By (request, number of tokens before the one to be sampled)."""
FEATURES = ["llama", "gemma2", "qwen2_moe", "gpt_oss", "deepseek_v3", "glm_moe_dsa"]
CASES = [*((family, "float32") for family in FEATURES), ("llama", "bfloat16"), ("qwen3_moe", "bfloat16")]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(
    model: Model,
    dtype: str,
    requests: list[Request],
    *,
    num_blocks: int = 200,
    arrivals: tuple[int, ...] = (),
    depth: int = 1,
    **config: object,
) -> tuple[Logits, dict[str, list[int]]]:
    """`arrivals`: the step before which each request is added; those without one come at once."""
    engine = EngineConfig(**{"block_size": 4, **config})  # type: ignore[arg-type]
    shard = KVShard.whole(model.spec.kv_layout(4, dtype))
    buffer = memoryview(bytearray(b"\xff" * shard.pool_bytes(num_blocks)))
    runner = Runner(model, KVPool(shard, num_blocks, buffer), 4)
    scheduler = StepScheduler(engine, num_blocks, 128, FifoPolicy())
    seen: Logits = {}
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}

    def step(plan: StepPlan) -> StepResult:
        made: list[torch.Tensor] = []
        logits = Model.logits
        model.logits = lambda hidden: made.append(logits(model, hidden)) or made[-1].clone()  # type: ignore[method-assign]
        result = runner.step(plan)
        to_sample = [item for item in plan.work if item.samples]
        for item, row in zip(to_sample, made[0] if made else [], strict=True):
            key = (item.key.split("#")[0], item.start + item.count)
            assert key not in seen or torch.equal(seen[key], row)
            seen[key] = row
        return result

    waiting = [(arrivals[i] if i < len(arrivals) else 0, request) for i, request in enumerate(requests)]
    flight: list[StepPlan] = []
    number = 0
    while True:
        for _, request in [pair for pair in waiting if pair[0] <= number]:
            scheduler.sequences.add(request)
        waiting = [pair for pair in waiting if pair[0] > number]
        while len(flight) < depth and (plan := scheduler.plan(0.0)):
            flight.append(plan)
        number += 1
        if flight:
            for token in scheduler.commit(flight[0], step(flight.pop(0)), 0.0):
                tokens[token.request_id].append(token.token)
        elif not waiting:
            return seen, tokens


def requests_of(rng: random.Random) -> list[Request]:
    """Prompts of which some share prefixes; greedy and sampled."""
    shared = tuple(rng.randrange(2, VOCAB) for _ in range(40))
    lengths, more = (40, 13, 0, 40, 21), (1, 9, 30, 12, 2)
    texts = [
        (*shared[:n], *(rng.randrange(2, VOCAB) for _ in range(m)))
        for n, m in zip(lengths, more, strict=True)
    ]
    sampling = [SamplingParams(temperature=t, top_p=p, seed=7, max_tokens=8) for t, p in ((0.0, 1.0), (0.8, 0.9))]  # fmt: skip
    return [
        Request(id=str(i), prompt=text, sampling=sampling[i % 2], reply_to="f")
        for i, text in enumerate(texts)
    ]


@dataclass(repr=False, kw_only=True)
class Alone:
    """Requests, and what each says by itself, its prompt in one step."""

    model: Model
    ordinary: Model
    dtype: str
    requests: list[Request]
    logits: Logits
    tokens: dict[str, list[int]]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    family, dtype = request.param
    folder: Path = tmp_path_factory.mktemp(family)
    rng = random.Random(family)
    make(folder, FAMILIES[family](rng, 1), seed=1)
    model = load_model(folder, dtype, CPU, options=LoadOptions(deterministic=True))
    requests = requests_of(rng)
    logits: Logits = {}
    tokens: dict[str, list[int]] = {}
    for each in requests:
        got = run(model, dtype, [each], prefix_cache=False)
        logits, tokens = logits | got[0], tokens | got[1]
    return Alone(
        model=model,
        ordinary=load_model(folder, dtype, CPU),
        dtype=dtype,
        requests=requests,
        logits=logits,
        tokens=tokens,
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(5)),
    count=st.integers(1, 5),
    arrivals=st.lists(st.integers(0, 12), max_size=5).map(tuple),
    num_blocks=st.sampled_from((200, 40, 26)),
    depth=st.sampled_from((1, 2)),
    budget=st.sampled_from((3, 17, 70, 256)),
    cache=st.booleans(),
)
def test_the_same_bits_in_any_batch(
    alone: Alone, order: list[int], count: int, arrivals: tuple[int, ...], *, num_blocks: int, depth: int, budget: int, cache: bool
) -> None:  # fmt: skip
    got, sampled = run(
        alone.model,
        alone.dtype,
        [alone.requests[i] for i in order[:count]],
        num_blocks=num_blocks,
        arrivals=arrivals,
        depth=depth,
        max_batch_tokens=budget,
        prefix_cache=cache,
    )
    assert {key for key in alone.logits if key[0] in sampled} == got.keys()
    assert [key for key, row in got.items() if not torch.equal(row, alone.logits[key])] == []
    assert sampled == {id: alone.tokens[id] for id in sampled}


def test_the_ordinary_operations_say_nearly_the_same(alone: Alone) -> None:
    tolerance = 1e-4 if alone.dtype == "float32" else 6e-2
    ordinary, _ = run(alone.ordinary, alone.dtype, alone.requests)
    for request in alone.requests:
        key = (request.id, len(request.prompt))
        difference = ordinary[key] - alone.logits[key]
        assert difference.norm() < tolerance * alone.logits[key].norm()

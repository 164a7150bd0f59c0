"""Models that keep states in the real runner and scheduler: what transformers says, whatever the pool, the chunks, the batch."""

import random
from pathlib import Path
from typing import Any

import pytest

from core.config.cluster_config import EngineConfig, ModelConfig
from core.errors import ConfigError
from core.kv import PAGE_BYTES
from core.types import Request, SamplingParams
from engine.sizing.model_dims import check_mesh
from engine.sizing.pool_size import size_pool
from models.families.table import read_spec
from models.registry import load_model
from parallel.mesh import Mesh
from tests.engine.execution.drafting.test_speculation import Adversary
from tests.engine.execution.test_runner import Instance, prompts
from tests.models.checkpoints import COMPRESSED, CPU, HYBRID, VOCAB, make
from tests.models.continuation import continuation
from tests.parallel.families import awkward

LENGTH = 64
KEEPING = HYBRID | COMPRESSED


def requests_of(texts: list[tuple[int, ...]]) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, min_tokens=LENGTH, masked_until_min=(1,))
    return [Request(id=str(i), prompt=text, sampling=sampling, reply_to="f") for i, text in enumerate(texts)]


@pytest.mark.turns(3)
@pytest.mark.parametrize(("family", "i"), [*((family, 0) for family in KEEPING), ("deepseek_v4", 3)])
def test_greedy_equals_transformers_whatever_the_pool_the_chunks_and_the_batch(
    family: str, i: int, tmp_path: Path
) -> None:
    rng = random.Random(family)
    reference = make(tmp_path, KEEPING[family](rng, i), seed=2)
    model = load_model(tmp_path, "float32", CPU)
    texts = prompts(rng)
    want, requests = dict[str, list[int]](), requests_of(texts)
    states = model.spec.kv_layout(4, "float32").state_blocks
    assert states > 0
    num_preempted = 0
    for num_blocks, budget, depth in (
        (7 * (states + 30), 64, 2),
        (2 * states + 40, 5, 2),
        (3 * states + 45, 64, 1),
    ):
        instance = Instance(model, num_blocks, depth, max_batch_tokens=budget)
        got = instance.run(requests)
        want = want or {
            id: continuation(reference, texts[int(id)], said, LENGTH, barred=[1]) for id, said in got.items()
        }
        assert got == want, (num_blocks, budget, depth)
        num_preempted += instance.num_announced - len(requests)
    assert num_preempted > 0
    for request in requests[:2]:
        assert Instance(model, 2 * states + 40).run([request])[request.id] == want[request.id]


@pytest.mark.turns(3)
@pytest.mark.parametrize("pool", ["host", "simulated"])
@pytest.mark.parametrize("family", KEEPING)
def test_a_prefix_that_others_had_goes_on_from_its_checkpoint(family: str, pool: str, tmp_path: Path) -> None:
    """Tokens and their probabilities are those of computing all of it. The windows of DeepSeek-V4, of 4 and of 11 tokens here, are
    not complete at its checkpoints."""
    rng = random.Random(family)
    make(tmp_path, KEEPING[family](rng, 2 if family in COMPRESSED else 0), seed=2)
    model = load_model(tmp_path, "float32", CPU)
    shared = [rng.randrange(2, VOCAB) for _ in range(41)]
    texts = [(*shared, *(rng.randrange(2, VOCAB) for _ in range(n))) for n in (7, 5, 9)]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=12, min_tokens=12, masked_until_min=(1,), num_logprobs=2
    )
    num_blocks = 12 * model.spec.kv_layout(4, "float32").state_blocks + 200
    where = {} if pool == "host" else {pool: True}
    warm = Instance(model, num_blocks, max_batch_tokens=9, **where)
    hits: list[int] = []
    for i, text in enumerate((*texts, texts[0])):
        before = warm.scheduler.load().prefix_tokens[1]
        request = Request(id=str(i), prompt=text, sampling=sampling, reply_to="f")
        got = warm.run([request])[request.id]
        hits.append(warm.scheduler.load().prefix_tokens[1] - before)
        cold = Instance(model, num_blocks, prefix_cache=False)
        assert got == cold.run([request])[request.id]
        for here, there in zip(warm.said[request.id], cold.said[request.id], strict=True):
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
            assert dict(here.top) == pytest.approx(dict(there.top), abs=1e-4)
    # The second prompt finds no state where it departs from the first, and leaves one there.
    assert hits == [0, 0, 40, 44]


def test_checkpoints_are_given_up_for_what_runs(tmp_path: Path) -> None:
    rng = random.Random(3)
    make(tmp_path, HYBRID["granite_hybrid"](rng, 1), seed=2)
    model = load_model(tmp_path, "float32", CPU)
    states = model.spec.kv_layout(4, "float32").state_blocks
    texts = [tuple(rng.randrange(2, VOCAB) for _ in range(50)) for _ in range(6)]
    num_blocks = 3 * states + 60
    instance = Instance(model, num_blocks, max_batch_tokens=16)
    found = instance.run(requests_of(texts))
    assert instance.num_copies % states == 0
    assert instance.num_copies > 0
    assert instance.scheduler.load().num_available_blocks == num_blocks
    assert found == Instance(model, num_blocks, prefix_cache=False).run(requests_of(texts))


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v4"])
def test_a_state_in_another_memory_is_the_same(family: str, tmp_path: Path) -> None:
    rng = random.Random(7)
    make(tmp_path, KEEPING[family](rng, 1), seed=2)
    model = load_model(tmp_path, "float32", CPU)
    requests = requests_of(prompts(rng))[:3]
    num_blocks = 3 * (model.spec.kv_layout(4, "float32").state_blocks + 30)
    here = Instance(model, num_blocks, max_batch_tokens=9).run(requests)
    there = Instance(model, num_blocks, max_batch_tokens=9, simulated=True)
    assert there.run(requests) == here
    drafts = Adversary(here, random.Random(2))
    drafting = Instance(model, num_blocks, max_batch_tokens=9, drafter=drafts, simulated=True)
    assert drafting.run(requests) == here
    proposed, right = drafting.scheduler.load().draft_tokens
    assert proposed > right > 0
    assert not drafting.device.violations


@pytest.mark.parametrize("family", HYBRID)
def test_a_pool_has_room_for_layers_that_keep_keys_and_values_alone(family: str, tmp_path: Path) -> None:
    config: Any = HYBRID[family](random.Random(3), 3)
    make(tmp_path, config, seed=2)
    size = size_pool(tmp_path, ModelConfig(), EngineConfig(num_blocks=400, block_size=4), device=CPU)
    num_keeping = sum(kind in ("attention", "full_attention") for kind in config.layer_types)
    assert 0 < num_keeping < config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kept = 2 * config.num_key_value_heads * head_dim
    if hasattr(config, "kv_lora_rank"):
        kept = config.kv_lora_rank + config.qk_rope_head_dim
    num_bytes = 400 * 4 * num_keeping * kept * 4
    assert num_bytes <= size.num_bytes < num_bytes + PAGE_BYTES


@pytest.mark.parametrize("family", HYBRID)
def test_a_stage_has_a_pool_for_its_own_layers_and_their_states(family: str, tmp_path: Path) -> None:
    """As many blocks as one rank has for the whole model take no more bytes in all stages together."""
    make(tmp_path, awkward(family), seed=2)
    engine = EngineConfig(num_blocks=400, block_size=4)
    whole, staged = (size_pool(tmp_path, ModelConfig(), engine, Mesh(pp=pp), device=CPU) for pp in (1, 2))
    assert [pool.shard.layers for pool in staged.pools] == [(0, 1), (1, 2)]
    assert staged.shard == whole.shard
    assert [pool.num_bytes for pool in staged.pools] == [whole.pools[0].num_bytes // 2] * 2
    assert sum(need.weight_bytes for need in staged.needs) == pytest.approx(
        whole.needs[0].weight_bytes, rel=0.1
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    make(path, HYBRID["qwen3_next"](random.Random(1), 0), seed=2)
    return path


@pytest.mark.parametrize(
    ("engine", "others", "named"),
    [
        ({"speculate": "mtp"}, {}, r"engine.speculate is mtp.*has no mtp\.pre_fc_norm_embedding\.weight"),
        ({"deterministic": True}, {}, "engine.deterministic"),
        ({"kv_dtype": "int8"}, {}, "engine.kv_dtype is int8"),
        ({"num_blocks": 9}, {}, "num_blocks of 9.*recurrent state takes"),
        ({}, {"mesh": Mesh(pp=2), "role": "decode"}, r"cut into 1 at most.* decode\.tp=1, pp=1"),
    ],
)
def test_what_a_recurrent_state_does_not_allow_is_refused_before_a_weight_is_read(
    folder: Path, engine: dict[str, Any], others: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        size_pool(folder, ModelConfig(), EngineConfig(**engine), device=CPU, **others)


@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        (
            Mesh(pp=3),
            r"decode: pp 3 is impossible.*5 layers cannot fill 3.*cut into 2 at most.*: decode\.tp=1, pp=2",
        ),
        (
            Mesh(tp=4),
            r"2 KV heads and 4 key heads.*over 4 tensor-parallel ranks\. Nearest possible: decode\.tp=2",
        ),
    ],
)
def test_a_mesh_over_which_states_cannot_be_spread_is_refused_with_the_nearest_one(
    mesh: Mesh, named: str, tmp_path: Path
) -> None:
    make(tmp_path, awkward("qwen3_next"), seed=2)
    check_mesh(read_spec(tmp_path), Mesh(tp=2, ep=2, pp=2), "decode")
    with pytest.raises(ConfigError, match=named):
        check_mesh(read_spec(tmp_path), mesh, "decode")


def test_what_compressed_attention_cannot_do_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    make(tmp_path, COMPRESSED["deepseek_v4"](random.Random(1), 1), seed=2)
    spec = read_spec(tmp_path)
    with pytest.raises(ConfigError, match="decode.pp at 1"):
        check_mesh(spec, Mesh(pp=2), "decode")
    with pytest.raises(ConfigError, match=r"3 groups of heads \(o_groups\)"):
        check_mesh(spec, Mesh(tp=2), "decode")
    check_mesh(spec, Mesh(tp=3), "decode")
    with pytest.raises(ConfigError, match="keeps recurrent states, which no kernel reads in 8 bits"):
        size_pool(tmp_path, ModelConfig(), EngineConfig(kv_dtype="int8"), device=CPU)

"""DeepSeek-V4 in the real runner and scheduler: what transformers says, whatever the pool, the chunks, the cache and drafts."""

import random
from pathlib import Path

import pytest

from core.config.cluster_config import EngineConfig, ModelConfig
from core.errors import ConfigError
from core.types import Request, SamplingParams
from engine.sizing.model_dims import check_mesh
from engine.sizing.pool_size import size_pool
from models.families.table import read_spec
from models.registry import load_model
from parallel.mesh import Mesh
from tests.engine.execution.drafting.test_speculation import Adversary
from tests.engine.execution.test_runner import Instance, prompts
from tests.models.checkpoints import COMPRESSED, CPU, VOCAB, make
from tests.models.continuation import continuation

LENGTH = 64


def requests_of(texts: list[tuple[int, ...]], length: int = LENGTH, num_logprobs: int = 0) -> list[Request]:
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=length,
        min_tokens=length,
        masked_until_min=(1,),
        num_logprobs=num_logprobs,
    )
    return [Request(id=str(i), prompt=text, sampling=sampling, reply_to="f") for i, text in enumerate(texts)]


@pytest.mark.parametrize("i", [0, 3])
def test_greedy_equals_transformers_whatever_the_pool_the_chunks_and_the_batch(
    i: int, tmp_path: Path
) -> None:
    rng = random.Random(i)
    reference = make(tmp_path, COMPRESSED["deepseek_v4"](rng, i), seed=2)
    model = load_model(tmp_path, "float32", CPU)
    texts = prompts(rng)
    want, requests = dict[str, list[int]](), requests_of(texts)
    states = model.spec.kv_layout(4, "float32").state_blocks
    num_preempted = 0
    for num_blocks, budget, depth in ((7 * (states + 30), 64, 2), (2 * states + 40, 5, 2)):
        instance = Instance(model, num_blocks, depth, max_batch_tokens=budget)
        got = instance.run(requests)
        want = want or {
            id: continuation(reference, texts[int(id)], said, LENGTH, barred=[1]) for id, said in got.items()
        }
        assert got == want, (num_blocks, budget, depth)
        num_preempted += instance.num_announced - len(requests)
    assert num_preempted > 0


def test_a_prefix_goes_on_from_its_checkpoint_though_its_windows_were_not_complete(tmp_path: Path) -> None:
    rng = random.Random(4)
    make(tmp_path, COMPRESSED["deepseek_v4"](rng, 2), seed=2)  # windows of 4 and of 11 tokens, blocks of 4
    model = load_model(tmp_path, "float32", CPU)
    shared = [rng.randrange(2, VOCAB) for _ in range(41)]
    texts = [(*shared, *(rng.randrange(2, VOCAB) for _ in range(n))) for n in (7, 5, 9)]
    num_blocks = 12 * model.spec.kv_layout(4, "float32").state_blocks + 200
    warm = Instance(model, num_blocks, max_batch_tokens=9)
    hits: list[int] = []
    for request in requests_of([*texts, texts[0]], 12, 2):
        before = warm.scheduler.load().prefix_tokens[1]
        got = warm.run([request])[request.id]
        hits.append(warm.scheduler.load().prefix_tokens[1] - before)
        cold = Instance(model, num_blocks, prefix_cache=False)
        assert got == cold.run([request])[request.id]
        for here, there in zip(warm.said[request.id], cold.said[request.id], strict=True):
            assert here.logprob == pytest.approx(there.logprob, abs=1e-4)
    assert hits[2:] == [40, 44]


def test_drafts_and_another_memory_change_nothing(tmp_path: Path) -> None:
    rng = random.Random(7)
    make(tmp_path, COMPRESSED["deepseek_v4"](rng, 0), seed=2)
    model = load_model(tmp_path, "float32", CPU)
    requests = requests_of(prompts(rng))[:3]
    num_blocks = 3 * (model.spec.kv_layout(4, "float32").state_blocks + 30)
    here = Instance(model, num_blocks, max_batch_tokens=9).run(requests)
    drafts = Adversary(here, random.Random(2))
    drafting = Instance(model, num_blocks, max_batch_tokens=9, drafter=drafts, simulated=True)
    assert drafting.run(requests) == here
    proposed, right = drafting.scheduler.load().draft_tokens
    assert proposed > right > 0
    assert not drafting.device.violations


def test_what_it_cannot_do_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    make(tmp_path, COMPRESSED["deepseek_v4"](random.Random(1), 1), seed=2)
    spec = read_spec(tmp_path)
    with pytest.raises(ConfigError, match="decode.pp at 1"):
        check_mesh(spec, Mesh(pp=2), "decode")
    with pytest.raises(ConfigError, match=r"3 groups of heads \(o_groups\)"):
        check_mesh(spec, Mesh(tp=2), "decode")
    check_mesh(spec, Mesh(tp=3), "decode")
    with pytest.raises(ConfigError, match="keeps recurrent states, which no kernel reads in 8 bits"):
        size_pool(tmp_path, ModelConfig(), EngineConfig(kv_dtype="int8"), device=CPU)

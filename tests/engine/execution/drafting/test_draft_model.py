"""Draft models: what they propose, what they know of KV that others have computed, and what they are refused for."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from core.config.cluster_config import EngineConfig, ModelConfig
from core.config.draft_config import engine_of_role
from core.cost.memory_model import HOST_KV_SHARE, DeviceMemory
from core.errors import ConfigError
from core.kv import PAGE_BYTES, KVShard
from core.plan import StepPlan, StepResult
from core.types import Request, SamplingParams
from engine.execution.drafting.draft_kv import draft_layers
from engine.execution.drafting.draft_model import DraftModel
from engine.sizing.pool_size import RankMemory, size_pool
from models.causal_model import CausalModel
from models.families.table import read_spec
from models.lora.adapter import read_adapters
from models.registry import LoadOptions, load_model
from parallel.mesh import Mesh
from tests.engine.execution.drafting.test_speculation import Said, loaded, one_at_a_time, requests, said
from tests.engine.execution.test_runner import Instance
from tests.models.checkpoints import CPU, FAMILIES, HYBRID, VOCAB, make
from tests.models.continuation import continuation
from tests.models.peft_adapters import make_adapter


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    return loaded(tmp_path_factory.mktemp("target"), "llama", seed=1)


def unchecked(requests: list[Request]) -> list[Request]:
    """Requests of which nothing is known to the target that its draft model does not know."""
    return [
        replace(request, sampling=replace(request.sampling, max_tokens=24, stop_token_ids=()))
        for request in requests
    ]


def test_one_that_is_the_target_itself_is_always_right(target: CausalModel) -> None:
    """At any temperature, since both sample with the same numbers."""
    asked = unchecked(requests(random.Random(2), 8))
    instance = Instance(target, speculate="draft:itself", draft=target, max_batch_tokens=24)
    want = one_at_a_time(target, asked)
    assert said(instance, asked) == want
    proposed, right = instance.scheduler.load().draft_tokens
    assert proposed == right > 50


def test_one_that_knows_no_adapter_is_wrong_more_often_and_changes_no_token(tmp_path: Path) -> None:
    config = FAMILIES["llama"](random.Random("llama"), 0)
    reference = make(tmp_path / "base", config, seed=1)
    truth = make_adapter(tmp_path / "one", reference, 0)
    paths = {"one": str(tmp_path / "one")}
    (adapter,) = read_adapters(paths, read_spec(tmp_path / "base"))
    adapted = load_model(tmp_path / "base", "float32", CPU, options=LoadOptions(adapters=paths))
    draft = load_model(tmp_path / "base", "float32", CPU)
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    asked = [
        replace(request, sampling=sampling, adapter=adapter.key if at % 2 else "")
        for at, request in enumerate(requests(random.Random(2), 8))
    ]
    instance = Instance(adapted, speculate="draft:x", draft=draft, max_batch_tokens=24)
    found = said(instance, asked)
    for request in asked:
        tokens = [token.token for token in found[request.id]]
        model = truth if request.adapter else reference
        assert tokens == continuation(model, request.prompt, tokens, 24)
    proposed, right = instance.scheduler.load().draft_tokens
    assert proposed > right > 50


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(4))
def test_draft_tokens_are_what_the_draft_model_says_of_the_known_tokens(
    target: CausalModel, tmp_path: Path, seed: int
) -> None:
    """Whatever blocks it finds its KV in: those of others' prefixes, behind wrong draft tokens, and those that others have had
    since."""
    reference = make(tmp_path, FAMILIES["llama"](random.Random("llama"), 0), seed=1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    draft = load_model(tmp_path, "float32", CPU)
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    parts = [tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(4, 12))) for _ in range(3)]
    asked = [
        Request(id=f"{at}", prompt=rng.choice(parts) + rng.choice(parts), sampling=sampling, reply_to="f")
        for at in range(8)
    ]
    want = one_at_a_time(target, asked)
    instance = Instance(
        target,
        num_blocks=rng.choice((24, 40)),
        depth=rng.choice((1, 2)),
        prefix_cache=rng.random() < 0.7,
        max_batch_tokens=rng.choice((5, 64)),
        speculate="draft:alike",
        speculate_tokens=4,
        draft=draft,
    )
    verified = [
        (key, known, drafts)
        for _ in range(4)
        for key, known, drafts in drafts_of(instance, rng.sample(asked, 6), want)
    ]
    assert sum(map(len, (drafts for *_, drafts in verified))) > 50
    for key, known, drafts in set(verified):
        request = next(request for request in asked if request.key == key)
        tokens = [*request.prompt, *(token.token for token in want[request.id])][:known]
        rows = reference(torch.tensor([[*tokens, *drafts[:-1]]])).logits[0, -len(drafts) :]
        for draft, row in zip(drafts, rows, strict=True):
            assert row[draft] > row.max() - 1e-4, (key, known, drafts)


def drafts_of(instance: Instance, asked: list[Request], want: Said) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the draft tokens that are verified while `asked` are answered: of which sequence, and behind how many known
    tokens."""
    found: list[tuple[str, int, tuple[int, ...]]] = []
    instance.on_step = lambda plan: found.extend(
        (work.key, work.known_end, work.drafts) for work in plan.work if work.drafts
    )
    got = said(instance, asked)
    assert got == {id: want[id] for id in got}
    return found


class Reading:
    """A draft model that reads in pieces of `most` tokens, how many draft tokens of each step it has not made, and whether it
    told the time of its draft tokens."""

    def __init__(self, instance: Instance, model: CausalModel, most: int) -> None:
        self.unmade: list[int] = []
        self.has_time: list[bool] = []
        self.num_read_first = 0
        layers = draft_layers(KVShard.whole(model.spec.kv_layout(4, "float32")), 200, CPU)
        instance.draft_by(DraftModel(model, layers, 4, VOCAB, most_read=most))
        self.run_step, instance.run_step = instance.run_step, self.step

    def step(self, plan: StepPlan) -> StepResult:
        result = self.run_step(plan)
        self.unmade += [one.num_unmade for one in result.sampled]
        self.has_time.append(result.proposing_s > 0)
        assert not (result.proposing_s and result.reading_s)
        self.num_read_first += result.reading_s > 0
        return result


def test_what_it_has_not_seen_is_read_in_pieces_before_it_proposes(target: CausalModel) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    asked = [Request(id="r", prompt=tuple(range(2, 32)), sampling=sampling, reply_to="f")]
    instance = Instance(target, depth=1, speculate="draft:x")
    reading = Reading(instance, target, most=7)
    want = one_at_a_time(target, asked)
    assert said(instance, asked) == want
    first = next(at for at, unmade in enumerate(reading.unmade[1:]) if not unmade)
    assert first == 4, "the fifth piece of 7 has the last of the 35 tokens that are known then"
    proposed, right = instance.scheduler.load().draft_tokens
    assert proposed == right > 0
    assert reading.has_time[1:6] == [False, False, False, True, True], (
        "what takes long since much is read tells nothing"
    )
    assert reading.num_read_first == 3
    reading.unmade.clear()
    assert said(instance, asked) == want
    assert reading.unmade[1] == 0, "the KV that it has computed is found in the prefix cache's blocks"


def test_its_vocabulary_may_be_smaller_or_padded(target: CausalModel, tmp_path: Path) -> None:
    rng = random.Random(7)
    asked = requests(rng, 5)
    want = one_at_a_time(target, asked)
    for size in (VOCAB - 9, VOCAB + 3):
        config = FAMILIES["llama"](random.Random("llama"), 0)
        config.vocab_size = size
        make(tmp_path / str(size), config, seed=1)
        draft = load_model(tmp_path / str(size), "float32", CPU)
        instance = Instance(target, speculate="draft:x", draft=draft)
        assert said(instance, asked) == want
        assert instance.scheduler.load().draft_tokens[0] > 0


def test_it_proposes_nothing_behind_its_own_context(target: CausalModel, tmp_path: Path) -> None:
    config = FAMILIES["llama"](random.Random("llama"), 0)
    config.max_position_embeddings = 16
    make(tmp_path, config, seed=1)
    draft = load_model(tmp_path, "float32", CPU)
    prompt = tuple(range(2, 18))
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    asked = [Request(id="r", prompt=prompt, sampling=sampling, reply_to="f")]
    instance = Instance(target, speculate="draft:x", draft=draft)
    assert said(instance, asked) == one_at_a_time(target, asked)
    assert instance.scheduler.load().draft_tokens == (0, 0)


def with_tokenizer(folder: Path, names: list[str]) -> Path:
    tokenizer = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


NAMES = [f"t{number}" for number in range(VOCAB)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    make(path, FAMILIES["llama"](random.Random(1), 0), seed=2)
    return with_tokenizer(path, NAMES)


def drafting(folder: Path, family: Any, names: list[str] = NAMES) -> Path:
    """A checkpoint's description: there are no weights."""
    folder.mkdir()
    config = family(random.Random(3), 0)
    config.architectures = [{"qwen3_next": "Qwen3NextForCausalLM"}.get(config.model_type, "LlamaForCausalLM")]
    config.save_pretrained(folder)
    return with_tokenizer(folder, names)


def sized(folder: Path, draft: Path | str, **keys: Any) -> Any:
    engine = EngineConfig(
        speculate=f"draft:{draft}", **{"num_blocks": 100, "num_threads": 1, **keys.pop("engine", {})}
    )
    return size_pool(folder, ModelConfig(), engine, device=CPU, **keys)


def test_its_weights_and_its_kv_are_counted(folder: Path, tmp_path: Path) -> None:
    draft = drafting(tmp_path / "draft", FAMILIES["llama"])
    plain = size_pool(folder, ModelConfig(), EngineConfig(num_blocks=100), device=CPU)
    both, alone = (
        sized(folder, draft),
        size_pool(draft, ModelConfig(), EngineConfig(num_blocks=100), device=CPU),
    )
    assert both.needs[0].weight_bytes == plain.needs[0].weight_bytes + alone.needs[0].weight_bytes
    assert both.draft.shards[0].pool_bytes(100) == alone.num_bytes
    assert both.num_bytes == plain.num_bytes, "its KV is not in the memory that others write"


def test_a_model_with_recurrent_layers_may_have_one(tmp_path: Path) -> None:
    hybrid = drafting(tmp_path / "hybrid", HYBRID["qwen3_next"])
    both = sized(hybrid, drafting(tmp_path / "draft", FAMILIES["llama"]), engine={"num_blocks": 400})
    assert both.draft is not None


def test_it_leaves_less_room_for_kv(folder: Path, tmp_path: Path) -> None:
    draft = drafting(tmp_path / "draft", FAMILIES["llama"])
    memory = DeviceMemory(name="host", total_bytes=1 << 24, free_bytes=1 << 24, is_host=True)
    found = RankMemory(devices=(memory,))
    unsized = {"num_blocks": 0, "max_num_seqs": 4096, "max_batch_tokens": 8}
    both = sized(folder, draft, engine=unsized, found=found)
    plain = size_pool(folder, ModelConfig(), EngineConfig(**unsized, num_threads=1), device=CPU, found=found)
    assert 2 < both.num_blocks < plain.num_blocks
    left = (memory.free_bytes * 0.9 - both.needs[0].num_bytes) * HOST_KV_SHARE
    taken = both.num_bytes + both.draft.shards[0].pool_bytes(both.num_blocks)
    assert left * 0.9 < taken <= left + PAGE_BYTES


def test_what_cannot_be_proposed_by_it_is_refused_before_a_weight_is_read(
    folder: Path, tmp_path: Path
) -> None:
    draft = drafting(tmp_path / "draft", FAMILIES["llama"])
    with pytest.raises(ConfigError, match="decode has .*draft model serves instances of one rank"):
        sized(folder, draft, mesh=Mesh(pp=2), role="decode")
    with pytest.raises(ConfigError, match="Qwen3NextForCausalLM has recurrent layers"):
        sized(folder, drafting(tmp_path / "hybrid", HYBRID["qwen3_next"]))
    with pytest.raises(ConfigError, match="there is no model folder"):
        sized(folder, "/no/such/folder")
    names = [*NAMES[:5], "other", *NAMES[6:]]
    with pytest.raises(ConfigError, match="its token 5 is 'other', which is none there"):
        sized(folder, drafting(tmp_path / "other", FAMILIES["llama"], names))
    with pytest.raises(ConfigError, match="its token 5 is 't6', which is 6 there"):
        sized(folder, drafting(tmp_path / "swapped", FAMILIES["llama"], [*NAMES[:5], "t6", "t5", *NAMES[7:]]))
    bare = drafting(tmp_path / "bare", FAMILIES["llama"])
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        sized(folder, bare)


def test_fewer_tokens_of_the_same_names_are_the_same_vocabulary(folder: Path, tmp_path: Path) -> None:
    assert sized(folder, drafting(tmp_path / "draft", FAMILIES["llama"], NAMES[:-9])).draft is not None


def test_an_instance_that_prefills_alone_has_none() -> None:
    engine = EngineConfig(speculate="draft:x")
    assert engine_of_role(engine, "prefill").speculate == "none"
    assert engine_of_role(engine, "decode") == engine_of_role(engine, "both") == engine
    assert engine_of_role(EngineConfig(speculate="ngram"), "prefill").speculate == "ngram"

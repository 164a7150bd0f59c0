"""Heads that propose from the model's hidden states: what they propose, what they know of KV that others have computed, what they
take."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config.cluster_config import EngineConfig, ModelConfig
from core.config.draft_config import engine_of_role
from core.errors import ConfigError
from core.kv import KVLayout, KVShard
from core.types import Request, SamplingParams
from engine.execution.drafting.draft_head import DraftHead
from engine.sizing.pool_size import PoolSize, size_pool
from models.causal_model import CausalModel
from models.drafting.drafting_head import DraftingHead
from models.drafting.eagle import load_eagle, read_eagle
from models.drafting.mtp import load_mtp
from models.families.table import read_spec
from models.registry import LoadOptions, load_model
from parallel.mesh import ONE_RANK, Mesh
from tests.engine.execution.drafting.test_draft_model import drafts_of, unchecked
from tests.engine.execution.drafting.test_speculation import (
    num_states,
    one_at_a_time,
    requests,
    requests_of_64_seeds,
    said,
)
from tests.engine.execution.test_runner import Instance
from tests.models.checkpoints import COMPRESSED, CPU, FAMILIES, VOCAB, make
from tests.models.eagle_checkpoints import EagleReference, make_eagle, make_right_eagle, make_target
from tests.models.mtp_checkpoints import MtpReference, make_mtp, make_right_mtp

pytestmark = pytest.mark.turns(3)


@dataclass(frozen=True, slots=True)
class Made:
    reference: MtpReference | EagleReference
    model: CausalModel
    head: DraftingHead
    layout: KVLayout
    """How its KV is laid out, in blocks of 4 tokens."""
    speculate: str

    def instance(self, **keys: Any) -> Instance:
        given = {"speculate": self.speculate, "head": self.head, "head_layout": self.layout}
        return Instance(self.model, **{**given, **keys})


def made_mtp(folder: Path, reference: MtpReference) -> Made:
    is_hybrid = read_spec(folder).recurrent is not None
    model = load_model(folder, "float32", CPU, options=LoadOptions(deterministic=not is_hybrid))
    layout = model.spec.kv_layout(4, "float32")
    return Made(reference, model, load_mtp(folder, model, CPU), layout, "mtp")


def made_eagle(folder: Path, reference: EagleReference) -> Made:
    spec = read_eagle(folder / "head", read_spec(folder))
    model = load_model(folder, "float32", CPU, options=LoadOptions(deterministic=True, taps=spec.taps))
    head = load_eagle(folder / "head", model, CPU, block_size=4)
    return Made(reference, model, head, spec.layer.kv_layout(4, "float32"), "eagle:head")


Make = Callable[[Path], Made]
MAKE: dict[str, Make] = {
    "mtp": lambda folder: made_mtp(folder, make_mtp(folder, "deepseek_v3")),
    "glm": lambda folder: made_mtp(folder, make_mtp(folder, "glm4_moe")),
    "qwen": lambda folder: made_mtp(folder, make_mtp(folder, "qwen3_next")),
    "eagle": lambda folder: made_eagle(folder, make_eagle(folder / "head", make_target(folder))),
}
RIGHT: dict[str, Make] = {
    "mtp": lambda folder: made_mtp(folder, make_right_mtp(folder)),
    "eagle": lambda folder: made_eagle(folder, make_right_eagle(folder / "head", folder)),
}
SOURCES = ["mtp", "eagle", pytest.param("glm", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("source", "most"), [("mtp", 8), ("eagle", 1)])
def test_one_that_knows_what_follows_is_right_at_any_temperature(
    source: str, most: int, tmp_path: Path
) -> None:
    """Since it samples with the model's own numbers. The EAGLE head knows one token."""
    made = RIGHT[source](tmp_path)
    asked = unchecked(requests(random.Random(2), 8))
    instance = made.instance(max_batch_tokens=24, speculate_tokens=most)
    assert said(instance, asked) == one_at_a_time(made.model, asked)
    proposed, right = instance.scheduler.load().draft_tokens
    assert right > 0.95 * proposed > 30


@pytest.mark.parametrize("source", SOURCES)
def test_it_changes_no_token(source: str, tmp_path: Path) -> None:
    """In chunks, with preemptions, with lookahead and without, with the prefix cache and without."""
    made = MAKE[source](tmp_path)
    rng = random.Random(source)
    asked = requests(rng, 5)
    want = one_at_a_time(made.model, asked)
    num_proposed = num_preempted = 0
    for num_blocks, depth, most in ((200, 2, 64), (16, 1, 7)):
        instance = made.instance(
            num_blocks=num_blocks,
            depth=depth,
            max_batch_tokens=most,
            prefix_cache=num_blocks > 16,
            speculate_tokens=rng.choice((3, 8)),
        )
        for _ in ("nothing is known of prefixes", "all of them are"):
            assert said(instance, asked) == want
        num_proposed += instance.scheduler.load().draft_tokens[0]
        num_preempted += instance.scheduler.load().num_preempted
    assert num_proposed > 30
    assert num_preempted > 0


@pytest.mark.slow
@pytest.mark.parametrize("source", RIGHT)
def test_sixty_four_seeds_at_any_temperature(source: str, tmp_path: Path) -> None:
    """By heads that are right as far as they know what decides; in chunks, with preemptions."""
    made = RIGHT[source](tmp_path)
    asked = requests_of_64_seeds(random.Random(3))
    instance = made.instance(num_blocks=40, max_batch_tokens=24, max_num_seqs=8)
    assert said(instance, asked) == said(Instance(made.model), asked)
    proposed, right = instance.scheduler.load().draft_tokens
    assert proposed >= right > 0
    assert instance.scheduler.load().num_preempted > 0


def greedy_requests(rng: random.Random, count: int) -> list[Request]:
    """Requests of which nothing is known to the target that its head does not know."""
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    prompts = [tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(8, 24))) for _ in range(count)]
    return [
        Request(id=f"{at}", prompt=prompt, sampling=sampling, reply_to="f")
        for at, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("source", [*SOURCES, "qwen"])
def test_draft_tokens_are_what_its_definition_says_of_the_known_tokens(source: str, tmp_path: Path) -> None:
    """The draft tokens do not depend on a prompt's chunks, on wrong draft tokens before them, or on a preemption."""
    made = MAKE[source](tmp_path)
    rng = random.Random(source)
    asked = greedy_requests(rng, 6)
    want = one_at_a_time(made.model, asked)
    for depth, most in ((1, 5), (2, 64)):
        instance = made.instance(
            num_blocks=24 + 3 * num_states(made.model),
            depth=depth,
            prefix_cache=False,
            max_batch_tokens=most,
            speculate_tokens=4,
        )
        found = drafts_of(instance, asked, want)
        assert instance.scheduler.load().num_preempted > 0
        assert len(found) > 20
        for key, known, drafts in set(found):
            request = next(request for request in asked if request.key == key)
            tokens = [*request.prompt, *(token.token for token in want[request.id])][:known]
            rows = made.reference.logits(tokens, drafts[:-1])
            for draft, row in zip(drafts, rows, strict=True):
                assert row[draft] > row.max() - 1e-4, (key, known, drafts)


@pytest.mark.parametrize("source", SOURCES)
def test_what_was_read_of_a_prefix_is_there_for_all_that_begin_with_it(source: str, tmp_path: Path) -> None:
    """A later prompt goes on as the first did, and finds all that was computed for that one."""
    made = MAKE[source](tmp_path)
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    first = Request(id="first", prompt=tuple(range(2, 19)), sampling=sampling, reply_to="f")
    want = one_at_a_time(made.model, [first])
    output = tuple(token.token for token in want["first"])
    later = replace(first, id="later", prompt=(*first.prompt, *output[:10]))
    instance = made.instance()
    assert said(instance, [first]) == want
    want = one_at_a_time(made.model, [later])
    found = drafts_of(instance, [later], want)
    assert instance.scheduler.load().prefix_tokens[1] == 26, "six blocks, and a part of another one"
    assert found
    for _, known, drafts in found:
        tokens = [*later.prompt, *(token.token for token in want["later"])][:known]
        logits = made.reference.logits(tokens)[0]
        assert logits[drafts[0]] > logits.max() - 1e-4


@pytest.mark.parametrize("source", SOURCES)
def test_a_sequence_whose_states_are_elsewhere_is_proposed_from_the_next_block_on(
    source: str, tmp_path: Path
) -> None:
    """Its KV came from another instance, which had them. The tokens are what they would have been."""
    made = MAKE[source](tmp_path)
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    asked = [Request(id="r", prompt=tuple(range(2, 24)), sampling=sampling, reply_to="f")]
    want = one_at_a_time(made.model, asked)
    layout = replace(made.layout, block_size=8)
    instance = made.instance(block_size=8, head_layout=layout, speculate_tokens=2, max_batch_tokens=6)
    assert said(instance, asked) == want
    instance.draft_by(DraftHead(made.head, KVShard.whole(replace(layout, num_layers=1)), 200))
    longer = replace(asked[0], prompt=(*asked[0].prompt, *range(40, 52)))
    want = one_at_a_time(made.model, [longer])
    found = drafts_of(instance, [longer], want)
    assert instance.scheduler.load().prefix_tokens[1] == 22
    assert found[0][1] == len(longer.prompt) + 1
    for _, known, drafts in found:
        tokens = [*longer.prompt, *(token.token for token in want["r"])][:known]
        rows = made.reference.logits(tokens, drafts[:-1], first=24)
        for draft, row in zip(drafts, rows, strict=True):
            assert row[draft] > row.max() - 1e-4, "the first block of which it has all begins with token 24"


@pytest.mark.parametrize("source", RIGHT)
def test_a_sequence_without_any_states_is_proposed_from_the_next_block_on(
    source: str, tmp_path: Path
) -> None:
    made = RIGHT[source](tmp_path)
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=40)
    asked = [Request(id="r", prompt=tuple(range(2, 24)), sampling=sampling, reply_to="f")]
    want = one_at_a_time(made.model, asked)
    layout = replace(made.layout, block_size=8)
    instance = made.instance(block_size=8, head_layout=layout, speculate_tokens=1)
    assert said(instance, asked) == want
    instance.draft_by(DraftHead(made.head, KVShard.whole(replace(layout, num_layers=1)), 200))
    found = drafts_of(instance, asked, want)
    assert instance.scheduler.load().prefix_tokens[1] == 21, "all that the prompt's last token needs"
    assert min(known for _, known, _ in found) == 26, (
        "the first block of which it has all begins with token 24"
    )
    proposed, right = instance.scheduler.load().draft_tokens
    assert right > 0.9 * proposed > 10


def test_what_another_rank_has_decided_is_proposed(tmp_path: Path) -> None:
    made = MAKE["eagle"](tmp_path)
    asked = greedy_requests(random.Random(1), 2)
    want = one_at_a_time(made.model, asked)
    instance = made.instance()
    shape = KVShard.whole(made.layout)
    instance.draft_by(DraftHead(made.head, shape, 200, agree=lambda drafts: torch.full_like(drafts, 7)))
    found = drafts_of(instance, asked, want)
    assert {draft for _, _, drafts in found for draft in drafts} == {7}


def sized(folder: Path, speculate: str, mesh: Mesh = ONE_RANK, **model: Any) -> PoolSize:
    engine = EngineConfig(num_blocks=100, num_threads=1, speculate=speculate)
    return size_pool(folder, ModelConfig(**model), engine, mesh, role="decode", device=CPU)


def matrices(*tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors if tensor.ndim > 1)


def test_the_weights_and_the_kv_of_the_models_own_layer_are_counted(tmp_path: Path) -> None:
    reference = make_mtp(tmp_path, "deepseek_v3")
    plain, both = sized(tmp_path, "none"), sized(tmp_path, "mtp")
    added = both.needs[0].weight_bytes - plain.needs[0].weight_bytes
    numbers = matrices(*reference.block.parameters(), reference.own["eh_proj"])
    assert added == pytest.approx(4 * numbers, rel=0.01)
    assert both.draft is not None
    assert both.draft.shards[0].pool_bytes(
        100
    ) * reference.target.config.num_hidden_layers == plain.shard.pool_bytes(100)
    assert both.num_bytes == plain.num_bytes, "its KV is not in the memory that others write"
    assert both.needs[0].step_bytes > plain.needs[0].step_bytes


@pytest.mark.parametrize("own_embedding", [False, True])
def test_the_weights_and_the_kv_of_a_head_are_counted(own_embedding: bool, tmp_path: Path) -> None:
    reference = make_eagle(tmp_path / "head", make_target(tmp_path), own_embedding=own_embedding)
    plain, both = sized(tmp_path, "none"), sized(tmp_path, f"eagle:{tmp_path / 'head'}")
    added = both.needs[0].weight_bytes - plain.needs[0].weight_bytes
    assert added == 4 * matrices(*reference.own.values())
    assert both.draft is not None
    assert both.draft.shards[0].pool_bytes(1) == 2 * 2 * 8 * 16 * 4, (
        "keys and values of two heads, for 16 tokens"
    )
    assert both.num_bytes == plain.num_bytes


def test_ranks_share_the_weights_of_the_models_own_layer(tmp_path: Path) -> None:
    make_mtp(tmp_path, "deepseek_v3")
    alone = [sized(tmp_path, source).needs[0].weight_bytes for source in ("none", "mtp")]
    cut = [sized(tmp_path, source, Mesh(tp=2)).needs for source in ("none", "mtp")]
    added = [both.weight_bytes - plain.weight_bytes for plain, both in zip(*cut, strict=True)]
    assert alone[1] - alone[0] < sum(added) < 2 * (alone[1] - alone[0]), "but for what each has whole"


def test_what_none_can_be_used_with_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    make(tmp_path / "llama", FAMILIES["llama"](random.Random(1), 0), seed=1)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layer for multi-token prediction"):
        sized(tmp_path / "llama", "mtp")
    with pytest.raises(ConfigError, match="which is no EAGLE-3 head"):
        sized(tmp_path / "llama", f"eagle:{tmp_path / 'llama'}")
    make_mtp(tmp_path / "mtp", "deepseek_v3")
    with pytest.raises(ConfigError, match="decode has .*a head serves instances of which all ranks compute"):
        sized(tmp_path / "mtp", "mtp", Mesh(pp=2))
    make_eagle(tmp_path / "head", make_target(tmp_path))
    with pytest.raises(ConfigError, match="transformers computes LlamaForCausalLM, which keeps no states"):
        sized(tmp_path, f"eagle:{tmp_path / 'head'}", implementation="transformers")
    with pytest.raises(ConfigError, match="there is no model folder"):
        sized(tmp_path, "eagle:/no/such/folder")
    make(tmp_path / "streams", COMPRESSED["deepseek_v4"](random.Random(1), 0), seed=1)
    with pytest.raises(ConfigError, match="has 4 residual streams, and a head reads one"):
        sized(tmp_path / "streams", f"eagle:{tmp_path / 'head'}")


@pytest.mark.parametrize("speculate", ["mtp", "eagle:x"])
def test_an_instance_that_prefills_alone_has_none(speculate: str) -> None:
    engine = EngineConfig(speculate=speculate)
    assert engine_of_role(engine, "prefill").speculate == "none"
    assert engine_of_role(engine, "decode") == engine_of_role(engine, "both") == engine

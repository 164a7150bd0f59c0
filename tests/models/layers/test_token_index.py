"""Models whose queries choose the tokens that they attend to: which layers choose, that they do, and what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.errors import ConfigError, UnsupportedModel
from engine.sizing.model_dims import dims_of
from kernels.ops import AttentionMeta
from models.families.table import read_spec
from models.lora.targets import targets_of
from models.registry import load_model
from models.spec.latent_spec import TokenIndexSpec
from parallel.mesh import Mesh
from parallel.plans import check
from tests.models.checkpoints import CPU, FAMILIES, VOCAB, Paged, make
from tests.models.real_configs import write_config

INDEXED = ("deepseek_v32", "glm_moe_dsa")
TEXT = random.Random(7).choices(range(2, VOCAB), k=100)


def index_of(folder: Path) -> TokenIndexSpec:
    spec = read_spec(folder)
    assert spec.mla is not None
    assert spec.mla.index is not None
    return spec.mla.index


def changed(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def logits(folder: Path, cuts: tuple[int, ...] = (100,)) -> torch.Tensor:
    paged, rows, start = (
        Paged(load_model(folder, "float32", CPU), 1, random.Random(0)),
        list[torch.Tensor](),
        0,
    )
    for end in cuts:
        rows += paged.step([(0, start, TEXT[start:end])])
        start = end
    return torch.cat(rows)


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("family", INDEXED)
def test_long_texts_equal_transformers_and_attention_to_all_does_not(
    family: str, i: int, tmp_path: Path
) -> None:
    """The second half says whether the first could fail: with more tokens to choose than there are, others are likeliest."""
    reference = make(tmp_path, FAMILIES[family](random.Random(family), i), seed=i)
    with torch.inference_mode():
        want = reference(torch.tensor([TEXT])).logits[0]
    for cuts in ((100,), (7, 8, 9, 60, 61, 100)):
        torch.testing.assert_close(logits(tmp_path, cuts), want, atol=1e-4, rtol=1e-4)
    first = index_of(tmp_path).top_k
    dense = logits(changed(tmp_path, index_topk=200))
    torch.testing.assert_close(dense[:first], want[:first], atol=1e-4, rtol=1e-4)
    assert (dense.argmax(-1) != want.argmax(-1))[first:].float().mean() > 0.1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 4},
        {"index_topk_pattern": "FSSSFS"},
        {"index_topk_pattern": ["full", "full", "shared", "full", "shared", "shared"]},
        {"indexer_types": ["full", "shared", "shared", "full", "shared", "full"]},
    ],
)
def test_the_layers_that_choose_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    write_config(tmp_path, "zai-org/GLM-5")
    changed(tmp_path, num_hidden_layers=6, **fields)
    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=6, **fields)
    assert index_of(tmp_path).chooses == tuple(kind == "full" for kind in theirs.indexer_types)


def test_index_keys_lie_behind_latents(tmp_path: Path) -> None:
    layout = read_spec(write_config(tmp_path, "deepseek-ai/DeepSeek-V3.2")).kv_layout(16, "bfloat16")
    assert (layout.state, layout.head_dim, layout.token_bytes) == ("mla", 704, 61 * 704 * 2)


def test_a_layer_that_shares_a_choice_leaves_room_for_no_key(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["glm_moe_dsa"](random.Random(1), 3), seed=3)
    model = load_model(tmp_path, "float32", CPU)
    paged = Paged(model, 1, random.Random(0))
    paged.step([(0, 0, TEXT)])
    size = index_of(tmp_path).head_dim
    written = [not layer[..., -size:].isnan().all() for layer in paged.kv]
    assert written == list(index_of(tmp_path).chooses)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("deepseek-ai/DeepSeek-V3.2", {"q_lora_rank": None}, "q_lora_rank is null"),
        ("deepseek-ai/DeepSeek-V3.2", {"index_head_dim": 32}, "index_head_dim is 32 .* less than the 64"),
        ("deepseek-ai/DeepSeek-V3.2", {"index_topk": 0}, "index_topk is 0"),
        ("zai-org/GLM-5", {"indexer_types": ["full"]}, "indexer_types has 1 entries for 78"),
        ("zai-org/GLM-5", {"index_topk_pattern": "S" * 78}, "indexer_types begins with 'shared'"),
        ("zai-org/GLM-5", {"index_topk_pattern": "FX" * 39}, "indexer type 'X' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(name: str, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_config(tmp_path, name)
    with pytest.raises(UnsupportedModel, match=said):
        read_spec(changed(tmp_path, **fields))


def test_a_stage_begins_with_a_layer_that_chooses(tmp_path: Path) -> None:
    write_config(tmp_path, "zai-org/GLM-5")
    spec = read_spec(changed(tmp_path, num_hidden_layers=6, index_topk_pattern="FFSSFS"))
    check(dims_of(spec), Mesh(pp=3), "decode")
    with pytest.raises(ConfigError, match="6 layers cannot fill 4 .* into 3 at most.* pp=3"):
        check(dims_of(spec), Mesh(pp=4), "decode")


def test_adapters_reach_no_index(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["deepseek_v32"](random.Random(1), 1), seed=2)
    assert not [name for name in targets_of(read_spec(tmp_path)) if "self_attn" in name]


def test_parts_of_a_step_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same in all layers, and made of tensors that go to the device."""
    make(tmp_path, FAMILIES["glm_moe_dsa"](random.Random(1), 0), seed=2)
    paged = Paged(load_model(tmp_path, "float32", CPU), 1, random.Random(0))
    made, over = list[AttentionMeta](), AttentionMeta.over

    def counted(*arguments: Any, **more: Any) -> AttentionMeta:
        made.append(over(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(AttentionMeta, "over", counted)
    paged.step([(0, 0, TEXT[:40])])
    assert [meta.query_lens for meta in made] == [(40,), (8,), (32,)]

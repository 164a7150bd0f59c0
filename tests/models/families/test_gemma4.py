"""What Gemma 4's configurations become: where each layer's keys and values lie, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.config.cluster_config import EngineConfig, ModelConfig
from core.errors import ConfigError, UnsupportedModel
from engine.sizing.memory_needs import needs_of
from engine.sizing.model_dims import check_mesh, shards_of
from engine.sizing.pool_size import size_pool
from engine.sizing.stored_weights import stored_as
from kernels.head_places import HeadPlaces
from models.families.table import read_spec
from models.spec.kv_places import KVPlaces
from models.spec.model_spec import ModelSpec
from parallel.mesh import Mesh

LARGE: dict[str, Any] = {
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
"""As 31B, but for the number of layers."""
SMALL: dict[str, Any] = {
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
}
"""As E2B and E4B: later layers read what earlier ones have written."""


def spec_of(folder: Path, **fields: Any) -> ModelSpec:
    names = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    (folder / "config.json").write_text(json.dumps({**fields, **names}))
    return read_spec(folder)


def test_two_full_layers_share_a_layer_of_the_pool(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, **LARGE)
    layout = spec.kv_layout(16, "bfloat16")
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (11, 16, 256)
    assert layout.token_bytes == 10 * 2 * 16 * 256 * 2 + 2 * 2 * 4 * 512 * 2
    places = KVPlaces.of(spec, range(12))
    assert (places.heads[5], places.heads[11]) == (HeadPlaces(0, 4, 2), HeadPlaces(2, 4, 2))
    assert set(places.heads[:5] + places.heads[6:11]) == {None}
    assert places.written[5] == places.written[11] == 10
    assert [places.completed[layer] for layer in sorted(places.completed)] == list(range(11))
    assert spec.kv is not None
    assert spec.kv.stage_starts == (0, 1, 2, 3, 4, 5)


def test_later_layers_read_what_earlier_ones_have_written(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, **SMALL)
    layout = spec.kv_layout(16, "bfloat16")
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (4, 4, 256)
    places = KVPlaces.of(spec, range(12))
    assert places.heads[:6] == (
        *(HeadPlaces(0, 2, 1), HeadPlaces(1, 2, 1)) * 2,
        HeadPlaces(0, 2, 1),
        HeadPlaces(0, 2, 2),
    )
    assert places.heads[6:11] == (places.heads[4],) * 5
    assert places.heads[11] == places.heads[5]
    assert places.written == (0, 0, 1, 1, 2, 3, 2, 2, 2, 2, 2, 3)
    assert places.completed == {1: 0, 3: 1, 4: 2, 5: 3}
    assert spec.mlp_sizes == (9216,) * 6 + (2 * 9216,) * 6


def test_a_rank_has_its_share_of_every_kind_of_heads(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, **LARGE)
    layout = spec.kv_layout(16, "bfloat16")
    assert [shard.heads for shard in shards_of(spec, Mesh(tp=4), layout)] == [
        (0, 4),
        (4, 8),
        (8, 12),
        (12, 16),
    ]
    assert [shard.layers for shard in shards_of(spec, Mesh(pp=2), layout)] == [(0, 5), (5, 11)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        (
            {**LARGE, "num_global_key_value_heads": 3, "num_attention_heads": 48},
            "3 KV heads of 512 share no pool",
        ),
        ({**LARGE, "num_attention_heads": 24}, "24 attention heads over 16 KV heads"),
        ({"per_layer_config": {"05": {"sliding_window": 3}}}, "per_layer_config says 'sliding_window'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 30"),
        ({"layer_types": ["chunked_attention"] * 30}, "'chunked_attention' is not supported"),
        ({**SMALL, "num_kv_shared_layers": 7}, "num_kv_shared_layers is 7, but no earlier layer"),
        ({**SMALL, "vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9"),
        ({**SMALL, "enable_moe_block": True}, "use_double_wide_mlp is not supported with enable_moe_block"),
    ],
)
def test_what_gemma_4_cannot_be_is_named(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        spec_of(tmp_path, **fields)


@pytest.mark.parametrize(
    ("fields", "mesh", "named"),
    [
        (LARGE, Mesh(tp=8), r"have 4 KV heads.*Set decode\.tp to 4 at most"),
        (SMALL, Mesh(pp=2), r"hidden_size_per_layer_input.*Leave decode\.pp at 1"),
        (LARGE, Mesh(pp=7), "those that need earlier ones let them be cut into 6 at most"),
    ],
)
def test_meshes_that_cannot_be_are_named(
    tmp_path: Path, fields: dict[str, Any], mesh: Mesh, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        check_mesh(spec_of(tmp_path, **fields), mesh, "decode")


def test_parts_of_a_pool_are_not_stored_in_8_bits(tmp_path: Path) -> None:
    spec_of(tmp_path, **LARGE)
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype is int8.*KV heads of several kinds.*use auto"):
        size_pool(tmp_path, ModelConfig(), EngineConfig(kv_dtype="int8"))


@pytest.mark.parametrize("kind", ["large", "small", "sparse", "small and sparse"])
def test_weights_are_as_many_as_transformers_counts(kind: str, tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 704}
    both = {**SMALL, **experts, "use_double_wide_mlp": False}
    fields = {"large": LARGE, "small": SMALL, "sparse": {**LARGE, **experts}, "small and sparse": both}[kind]
    config = transformers.Gemma4TextConfig(**fields)
    with torch.device("meta"):
        counted = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    spec = spec_of(tmp_path, **config.to_dict())
    stored = stored_as(spec, "bfloat16", "full", torch.device("cuda"), deterministic=False)
    (needs,) = needs_of(spec, EngineConfig(), Mesh(), stored, context_tokens=1024)
    assert needs.weight_bytes == pytest.approx(2 * counted, rel=0.003)

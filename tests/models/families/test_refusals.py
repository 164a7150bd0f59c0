"""What cannot be served is said by name, before any weight is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.errors import ConfigError, UnsupportedModel
from models.families.table import read_spec
from models.files.hub import resolve
from models.registry import load_model

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, "NobodysForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["chunked_attention"]},
            "chunked_attention",
        ),
    ],
)
def test_an_unsupported_option_is_named_without_touching_weights(
    folder: Path, fields: dict[str, Any], named: str
) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=named):
        read_spec(change(folder, **fields))


def llama4(folder: Path, **fields: Any) -> Path:
    config = transformers.Llama4TextConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1
    )
    config.architectures = ["Llama4ForCausalLM"]
    config.save_pretrained(folder)
    return change(folder, **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "'yarn' is not supported with use_qk_norm",
        ),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' is not supported in this family"),
        ({"layer_types": ["chunked_attention"]}, "layer_types has 1 entries for 4"),
    ],
)
def test_what_llama_4_cannot_be_is_named(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_spec(llama4(tmp_path, **fields))


def test_blocks_that_a_chunk_cuts_are_refused(tmp_path: Path) -> None:
    spec = read_spec(llama4(tmp_path, attention_chunk_size=24))
    assert spec.kv_layout(8, "float32").block_size == 8
    with pytest.raises(UnsupportedModel, match=r"attention_chunk_size is 24.*engine\.block_size 16"):
        spec.kv_layout(16, "float32")


def test_old_and_new_rope_fields_mean_the_same(folder: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    new = read_spec(change(folder, rope_parameters={**scaling, "rope_theta": 5e5}))
    old = read_spec(change(folder, rope_parameters=None, rope_scaling=scaling, rope_theta=5e5))
    assert (new.rope.kind, new.rope.theta) == (old.rope.kind, old.rope.theta) == ("llama3", 5e5)


@pytest.mark.parametrize("kind", ["missing", "surplus", "misshapen"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_tensor(folder: Path, kind: str) -> None:
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    match kind:
        case "missing":
            del tensors[name]
        case "surplus":
            name = "model.layers.7.mlp.up_proj.weight"
            tensors[name] = torch.zeros(2)
        case _:
            tensors[name] = torch.zeros(3, 3)
    save_file(tensors, path)
    with pytest.raises(UnsupportedModel, match=name):
        load_model(folder, "float32", CPU)


def test_missing_files_are_said(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        load_model(folder, "float32", CPU)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(folder)
    with pytest.raises(ConfigError, match="no model folder"):
        resolve(str(tmp_path / "nothing"))


def test_bfloat16_loads_and_agrees_loosely(folder: Path) -> None:
    assert load_model(folder, "bfloat16", CPU).dtype is torch.bfloat16
    assert load_model(folder, "auto", CPU).dtype is torch.float32

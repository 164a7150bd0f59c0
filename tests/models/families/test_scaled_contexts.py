"""Contexts as model cards scale them: by rope_scaling, with max_position_embeddings as it was."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cluster.ingress.model_card import read_model_card
from core.config.cluster_config import load
from core.errors import ConfigError
from models.families.table import read_spec
from models.registry import load_model
from tests.models.checkpoints import CPU, Paged, make
from tests.models.spec.test_spec import spec_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"rope_scaling": YARN}, 256),
        ({"rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}}, 256),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4}}, 256),
        ({"rope_scaling": YARN, "max_position_embeddings": 80}, 256),
        ({"rope_scaling": YARN, "max_position_embeddings": 256}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 2.5}}, 160),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 64),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            64,
        ),
        ({}, 64),
    ],
)
def test_a_scaled_context_is_the_original_times_the_factor(
    fields: dict[str, Any], context: int, tmp_path: Path
) -> None:
    assert spec_of(tmp_path, **fields).max_context_tokens == context


def test_a_layer_types_scaling_of_gemma_3_is_in_its_context_already(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    fields = {"query_pre_attn_scalar": 2, "sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh"}
    spec = spec_of(tmp_path, "Gemma3ForCausalLM", rope_scaling=linear, **fields)
    assert spec.max_context_tokens == 64


@pytest.mark.parametrize(
    "scaling",
    [{**YARN, "original_max_position_embeddings": 16}, {"rope_type": "linear", "factor": 4.0}],
)
def test_logits_beyond_the_original_context_are_those_of_transformers(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, rope_parameters={"rope_theta": 1e4, **scaling},
    )  # fmt: skip
    reference = make(tmp_path, config, seed=0)
    assert read_spec(tmp_path).max_context_tokens == 64
    model = load_model(tmp_path, "float32", CPU)
    rng = random.Random(0)
    prompt = [rng.randrange(2, 64) for _ in range(60)]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    got = Paged(model, 1, rng).step([(0, 0, prompt)])
    torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=1e-4)


def test_a_context_beyond_the_largest_is_refused_with_what_would_allow_it(tmp_path: Path) -> None:
    spec_of(tmp_path)

    def card(limit: int) -> int:
        settings = {"model.path": str(tmp_path), "model.max_context_tokens": limit}
        return read_model_card(load({}, {}, settings)).max_context_tokens

    assert card(64) == 64
    with pytest.raises(ConfigError, match=r"100, but .* takes 64 tokens at most\..*\"factor\": 2\.0"):
        card(100)
    spec_of(tmp_path, rope_scaling=YARN)
    assert card(100) == 100
    with pytest.raises(ConfigError, match=r"257, but .* takes 256 tokens at most\..*\"factor\": 5\.0"):
        card(257)

"""How the configurations of Nemotron-H and Kimi-Linear say which layer is what."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import UnsupportedModel
from models.registry import load_model
from tests.models.checkpoints import CPU, HYBRID, VOCAB, Paged, make
from tests.models.spec.test_spec import spec_of

NEMOTRON = {"layer_norm_epsilon": 1e-5, "num_key_value_heads": 8, "hybrid_override_pattern": "M-*E"}


def test_layers_are_named_by_letters_or_by_words(tmp_path: Path) -> None:
    found = [
        spec_of(tmp_path, "NemotronHForCausalLM", **{**NEMOTRON, "layers_block_type": names})
        for names in (
            None,
            ["mamba", "mlp", "attention", "moe"],
            ["linear_attention", "mlp", "full_attention", "moe"],
        )
    ]
    kept, moe = found[0].recurrent, found[0].moe
    assert kept is not None
    assert moe is not None
    assert kept.kinds == ("state_space", "none", "kv", "none")
    assert (found[0].feeds, moe.sparse) == ((False, True, False, True), (False, False, False, True))
    assert found[1] == found[2] == found[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hybrid_override_pattern": "M*X"}, "hybrid_override_pattern has 'X'"),
        ({"hybrid_override_pattern": "M-M-"}, "no layer attends"),
        ({"layers_block_type": ["attention", "conv"]}, "layer type 'conv'"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu'"),
    ],
)
def test_what_nemotron_cannot_do_is_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        spec_of(tmp_path, "NemotronHForCausalLM", **{**NEMOTRON, **fields})


def test_a_model_of_attention_and_blocks_alone_keeps_no_state(tmp_path: Path) -> None:
    rng = random.Random(1)
    config = HYBRID["nemotron_h"](rng, 1)
    config.layers_block_type = ["full_attention", "mlp", "full_attention", "moe"]
    reference = make(tmp_path, config, seed=2)
    model = load_model(tmp_path, "float32", CPU)
    assert model.spec.kv_layout(4, "float32").state_blocks == 0
    prompt = [rng.randrange(2, VOCAB) for _ in range(30)]
    with torch.inference_mode():
        want = reference(torch.tensor([prompt])).logits[0]
    paged = Paged(model, 1, rng)
    parts = paged.step([(0, 0, prompt[:11])]) + paged.step([(0, 11, prompt[11:])])
    torch.testing.assert_close(torch.cat(parts), want, atol=1e-4, rtol=1e-4)


def test_kimi_linear_counts_its_layers_from_one(tmp_path: Path) -> None:
    own: dict[str, Any] = {"head_dim": 8, "num_heads": 3, "short_conv_kernel_size": 2}
    lists = {"full_attn_layers": [2, 4], "kda_layers": [1, 3]}
    kept = spec_of(tmp_path, "KimiLinearForCausalLM", linear_attn_config={**own, **lists}).recurrent
    assert kept is not None
    assert kept.kinds == ("channel_delta", "kv", "channel_delta", "kv")
    assert (kept.shape.num_value_heads, kept.shape.key_dim, kept.shape.conv_kernel) == (3, 8, 2)
    with pytest.raises(UnsupportedModel, match=r"name the layers \[1, 2\] of 4"):
        spec_of(tmp_path, "KimiLinearForCausalLM", linear_attn_config={**own, "full_attn_layers": [1, 2]})
    with pytest.raises(UnsupportedModel, match="mla_use_nope False"):
        spec_of(tmp_path, "KimiLinearForCausalLM", linear_attn_config={**own, **lists}, mla_use_nope=False)

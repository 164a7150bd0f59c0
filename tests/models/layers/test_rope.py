"""Rotary frequencies against transformers' own, from configs of both generations."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.errors import UnsupportedModel
from kernels.torch.reference import reference_ops
from models.families.dense import llama
from models.layers.rope import Rotations, inverse_frequencies
from models.spec.model_spec import rope_spec

FACTORS = st.floats(1.0, 40.0)
PARAMETERS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("default")}),
    st.fixed_dictionaries({"rope_type": st.sampled_from(("linear", "dynamic")), "factor": FACTORS}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": FACTORS,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
        },
        optional={"original_max_position_embeddings": st.sampled_from((64, 8192))},
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": FACTORS},
        optional={
            "original_max_position_embeddings": st.sampled_from((64, 4096)),
            "attention_factor": st.floats(0.5, 2.0),
            "beta_fast": st.sampled_from((16.0, 32.0)),
            "beta_slow": st.sampled_from((1.0, 2.0)),
            "mscale": st.just(0.8),
            "mscale_all_dim": st.just(1.2),
            "truncate": st.booleans(),
        },
    ),
)


def new_style(parameters: dict[str, Any], theta: float) -> dict[str, Any]:
    return {"rope_parameters": {**parameters, "rope_theta": theta}}


def old_style(parameters: dict[str, Any], theta: float) -> dict[str, Any]:
    scaling = dict(parameters)
    scaling["type"] = scaling.pop("rope_type")
    return {"rope_scaling": scaling, "rope_theta": theta}


@pytest.mark.parametrize("style", [new_style, old_style])
@given(
    parameters=PARAMETERS,
    theta=st.sampled_from((1e4, 5e5, 1e6)),
    head_dim=st.sampled_from((8, 64, 80)),
    top_level=st.sampled_from((None, 128)),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_frequencies_equal_transformers(
    style: Any, parameters: dict[str, Any], theta: float, head_dim: int, top_level: int | None
) -> None:
    config: dict[str, Any] = {"max_position_embeddings": 2048, **style(parameters, theta)}
    if top_level is not None:
        config["original_max_position_embeddings"] = top_level
    reference = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=2048,
        rope_parameters={**parameters, "rope_theta": theta},
        **({} if top_level is None else {"original_max_position_embeddings": top_level}))  # fmt: skip
    if parameters["rope_type"] == "default":
        want, want_factor = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
    else:
        want, want_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](reference, CPU)
    got, factor = inverse_frequencies(rope_spec(config), head_dim, 2048)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-9)
    assert factor == pytest.approx(want_factor)


@pytest.mark.parametrize("served", [1, 512, 513, 2048])
@pytest.mark.parametrize("given", [{}, {"factor": 4.0}, {"attention_factor": 1.5}])
def test_long_factors_are_those_of_all_texts_where_any_may_be_long(
    given: dict[str, float], served: int
) -> None:
    """Served up to the length of its first training, a model has transformers' short factors, else its long ones."""
    lists = {"short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    rotation = {"rope_type": "longrope", **lists, **given}
    context = {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}
    reference = LlamaConfig(hidden_size=64, num_attention_heads=4, **context, rope_parameters=rotation)
    want, want_factor = ROPE_INIT_FUNCTIONS["longrope"](reference, CPU, seq_len=served)
    got, factor = inverse_frequencies(rope_spec({**context, "rope_parameters": rotation}), 16, served)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-9)
    assert factor == pytest.approx(want_factor)


CPU = torch.device("cpu")


def test_without_any_rope_keys_theta_is_ten_thousand() -> None:
    assert rope_spec({"max_position_embeddings": 8}).theta == 10000.0


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "'factor'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        rope_spec({"max_position_embeddings": 2048, **config})


@pytest.mark.parametrize("parameters", [{"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}])
def test_rotations_equal_transformers_in_whatever_order_positions_come(parameters: dict[str, Any]) -> None:
    """A processor keeps the first positions' rotations, more of them when they are needed, and computes later ones."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=65_536,
        rope_parameters={**parameters, "rope_theta": 1e4})  # fmt: skip
    reference, spec = (
        LlamaRotaryEmbedding(config),
        llama({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}),
    )
    rotations = Rotations(spec, range(2), reference_ops(), CPU)
    for positions in ([5], [7, 3], [1023, 1024], [40_000, 2], [32_767, 9000, 0], [], [5]):
        at = torch.tensor(positions, dtype=torch.int64)
        (got,) = rotations(at, torch.float32)
        cos, sin = reference(torch.zeros(1), at[None])
        torch.testing.assert_close(got.cos, cos[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(got.sin, sin[0], rtol=0, atol=1e-6)

"""Quantised checkpoints of every family say what the floats say that they stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import FAMILIES
from tests.models.formats.test_quantised import equal_models
from tests.models.stored import compressed, four_bits, packed_parts, quantise_all, scaled
from tests.models.stored_scaled import modelopt, modelopt_nvfp4

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 32},
    "llama4": {"no_rope_layers": [1, 0]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v32": {"mlp_layer_types": ["dense", "sparse"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "n_groups": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 32,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 16,
        "linear_num_heads": 2,
    },
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"]},
}
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A matrix as it is stored, and the floats that this stands for."""


def int8(weight: torch.Tensor) -> Stored:
    values, scales = scaled(weight, "int", "channel")
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def awq(weight: torch.Tensor) -> Stored:
    parts = packed_parts("awq", weight, 16)
    return parts, four_bits("awq", parts, 16)


WAYS: dict[str, Any] = {
    "int8": (int8, compressed(num_bits=8, type="int", strategy="channel")),
    "nvfp4": (modelopt_nvfp4, modelopt("NVFP4", group_size=16)),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}),
}
CASES = [(family, "int8") for family in sorted(FAMILIES)]
CASES += [(family, "nvfp4") for family in ("deepseek_v3", "gemma3", "gpt_oss", "phi3", "qwen3_moe")]
CASES += [(family, way) for family in ("nemotron_h", "kimi_linear") for way in ("int8", "nvfp4")]
CASES += [(family, "awq") for family in ("gemma3", "glm4", "granite", "olmo3", "phi3")]


@pytest.mark.turns(3)
@pytest.mark.parametrize(("family", "way"), CASES)
def test_it_says_what_its_floats_say(family: str, way: str, tmp_path: Path) -> None:
    (store, how), sizes = WAYS[way], {"head_dim": 16, **SIZES.get(family, {})}
    floats: list[torch.Tensor] = []

    def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        parts, meant = store(weight)
        floats.append(meant)
        return parts

    quantise_all(tmp_path / "stored", family, quantise, sizes, quantization_config=how)
    plain = iter(floats)
    quantise_all(tmp_path / "plain", family, lambda _: {"weight": next(plain)}, sizes)
    equal_models(tmp_path / "stored", tmp_path / "plain")

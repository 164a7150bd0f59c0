"""Quantised checkpoints of every family say what the floats say that they stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import FAMILIES
from tests.models.stored import compressed, four_bits, packed_parts, quantise_all, scaled
from tests.models.test_quantised import equal_models

SIZES: dict[str, dict[str, Any]] = {"llama4": {"no_rope_layers": [1, 0]}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_eight_bits_say_what_their_floats_say(family: str, tmp_path: Path) -> None:
    made: list[torch.Tensor] = []

    def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scales = scaled(weight, "int", "channel")
        made.append(values.float() * scales)
        return {"weight": values, "weight_scale": scales}

    how = compressed(num_bits=8, type="int", strategy="channel")
    sizes = {"head_dim": 16, **SIZES.get(family, {})}
    quantise_all(tmp_path / "stored", family, quantise, sizes, quantization_config=how)
    floats = iter(made)
    quantise_all(tmp_path / "plain", family, lambda _: {"weight": next(floats)}, sizes)
    equal_models(tmp_path / "stored", tmp_path / "plain")


@pytest.mark.parametrize("family", ["gemma3", "glm4", "granite", "olmo3", "phi3"])
def test_four_bits_say_what_their_floats_say(family: str, tmp_path: Path) -> None:
    made: list[dict[str, torch.Tensor]] = []

    def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        made.append(packed_parts("awq", weight, 16))
        return made[-1]

    quantise_all(tmp_path / "stored", family, quantise, {"head_dim": 16}, quantization_config=AWQ)
    parts = iter(made)
    quantise_all(
        tmp_path / "plain",
        family,
        lambda _: {"weight": four_bits("awq", next(parts), 16)},
        {"head_dim": 16},
    )
    equal_models(tmp_path / "stored", tmp_path / "plain")

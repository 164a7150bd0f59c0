"""How a GGUF file's queries and keys are rotated, in the words of `rope_parameters`."""

import math
from typing import Any, Final

import numpy as np

from core.errors import UnsupportedModel
from models.files.gguf_reader import ROPE_FACTORS, Gguf

Config = dict[str, Any]
_LLAMA3: Final = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Llama 3.1 and 3.2 say alike; their `factor` is the largest of the file's factors."""
_NEVER: Final = 1e29
"""What divides the frequencies of pairs that are not rotated, and more."""
_YARN: Final = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}


def rope_of(file: Gguf, head_dim: int) -> Config:
    """Return `rope_parameters`. Raises UnsupportedModel."""
    rotated = file.get("rope.dimension_count", head_dim)
    parameters = {"rope_theta": file.get("rope.freq_base", 10000.0), **_scaling(file, rotated)}
    return parameters if rotated >= head_dim else {**parameters, "partial_rotary_factor": rotated / head_dim}


def _scaling(file: Gguf, rotated: int) -> Config:
    kind = file.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        scaled: Config = {"rope_type": kind, "factor": file.need("rope.scaling.factor")}
        said = {
            "original_max_position_embeddings": "original_context_length",
            **(_YARN if kind == "yarn" else {}),
        }
        found = {key: file.get(f"rope.scaling.{name}") for key, name in said.items()}
        scaled |= {key: value for key, value in found.items() if value is not None}
        if kind == "yarn" and (more := file.get("rope.scaling.attn_factor")) is not None:
            # llama.cpp's comes on top of YaRN's own.
            scaled["attention_factor"] = more * (1 + 0.1 * math.log(scaled["factor"]))
        return scaled
    if kind not in ("none", "longrope"):
        raise UnsupportedModel(
            f"{file.name} has rope scaling {kind!r}, which is not supported (linear, yarn and longrope are)"
        )
    factors = file.numbers(ROPE_FACTORS)
    return {"rope_type": "default"} if factors is None else _by_factors(file, factors, rotated)


def _by_factors(file: Gguf, factors: np.ndarray, rotated: int) -> Config:
    largest = float(factors.max())
    if largest == 1.0:
        return {"rope_type": "default"}
    if largest >= _NEVER:  # Gemma 4's, of which the other part of each head is not rotated
        return {"rope_type": "proportional", "partial_rotary_factor": float(np.mean(factors < _NEVER))}
    theta = file.get("rope.freq_base", 10000.0)
    for high in (4.0, 1.0) if len(factors) == rotated // 2 else ():
        if np.allclose(factors, llama3_factors(theta, rotated, largest, high), rtol=1e-3):
            return {**_LLAMA3, "high_freq_factor": high, "factor": largest}
    raise UnsupportedModel(f"the factors {ROPE_FACTORS!r} of {file.name} are not those of Llama 3")


def llama3_factors(theta: float, head_dim: int, factor: float, high: float = 4.0) -> np.ndarray:
    """What `rope_type: llama3` divides each frequency by (transformers' `_compute_llama3_parameters`). Llama 4's `high` is 1."""
    low, length = 1.0, 8192.0
    turns = length / (2 * np.pi * np.float64(theta) ** (np.arange(0, head_dim, 2) / head_dim))
    share = np.clip((turns - low) / (high - low), 0, 1) if high > low else (turns >= low).astype(float)
    return 1 / ((1 - share) / factor + share)

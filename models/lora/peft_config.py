"""Reads PEFT's adapter_config.json, and refuses what it asks for and no layer here does."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.errors import ConfigError, UnsupportedModel

NAME = "adapter_config.json"
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version"),
        # What was trained and how. Which modules have matrices the file of tensors says.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying"),
        *("megatron_core", "qalora_group_size"),
    }
)  # fmt: skip
_STARTS = ("gaussian", "eva", "orthogonal")
"""How a training may begin without a change of the model's own matrices."""


class PeftConfig(BaseModel):
    """What is said of an adapter's matrices. `model_extra` has PEFT's other fields."""

    model_config = ConfigDict(extra="allow", frozen=True)

    peft_type: str
    r: int = Field(ge=1)
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    """By a regular expression for the end of a module's name, what stands in place of `r` and of `lora_alpha`."""
    bias: str = "none"
    init_lora_weights: bool | str | None = None

    def rank(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """Return what a module's product is multiplied with."""
        rank, alpha = self.rank(module), _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_peft_config(name: str, folder: Path) -> PeftConfig:
    """Read the configuration of the adapter `name`. Raises ConfigError and UnsupportedModel."""
    path = folder / NAME
    try:
        config = PeftConfig.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"adapter {name!r}: {folder} has no {NAME}: give a folder that PEFT has written"
        ) from None
    except OSError as error:
        raise ConfigError(f"adapter {name!r}: cannot read {path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ConfigError(f"adapter {name!r}: {path}: {where}: {first['msg']}") from None
    for what in _refused(config):
        raise UnsupportedModel(f"adapter {name!r}: {path} has {what}, which is not supported")
    return config


def _refused(config: PeftConfig) -> Iterator[str]:
    if config.peft_type != "LORA":
        yield f"peft_type {config.peft_type!r} (LORA is)"
    if config.bias != "none":
        yield f"bias {config.bias!r} (none is)"
    start = config.init_lora_weights
    if isinstance(start, str) and start not in _STARTS:
        yield (
            f"init_lora_weights {start!r}, with which training has changed the model's own matrices (convert it: PEFT's "
            "save_pretrained does with path_initial_model_for_weight_conversion)"
        )
    others: dict[str, Any] = config.model_extra or {}
    yield from (f"{key}: {value!r}" for key, value in others.items() if value and key not in _WITHOUT_EFFECT)


def _by_pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """Return the value of the first pattern that fits the end of a module's name, as PEFT does."""
    fitting = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(fitting, default)

"""Service classes, tenants with their keys, and limits: the part of the configuration that `serve.live_file` may replace."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from core.types import Slo

_FROZEN = ConfigDict(frozen=True, extra="forbid")


class LimitsConfig(BaseModel):
    """What may be asked of the whole cluster. A limit of 0 is none."""

    model_config = _FROZEN

    max_requests_per_min: int = Field(default=0, ge=0)
    max_tokens_per_min: int = Field(default=0, ge=0)
    """Prompt and output together."""
    max_concurrent: int = Field(default=0, ge=0)
    """Sequences at once: each choice of a request is one."""
    max_tokens_per_day: int = Field(default=0, ge=0)
    """Prompt and output together; a day begins at midnight UTC."""
    max_tokens_per_month: int = Field(default=0, ge=0)
    """The same of a month, which begins on its first day at midnight UTC."""


class TenantConfig(LimitsConfig):
    """Who holds certain keys, and what they may ask of the cluster. A limit of 0 is none."""

    keys: tuple[SecretStr, ...] = ()
    keys_file: str = ""
    """More keys, one a line, in a file that the ingress can read; `#` begins a comment."""
    slo_classes: tuple[str, ...] = ()
    """Service classes that may be asked for, the default first; empty: all, and `standard`."""
    models: tuple[str, ...] = ()
    """Models that may be seen and used, by their names in `models`; empty: all."""
    weight: float = Field(default=1.0, gt=0)
    """Its share of the service while other tenants wait as well, beside theirs."""
    per_key: LimitsConfig = LimitsConfig()
    """Limits of each of its keys, next to its own."""
    per_model: Mapping[str, LimitsConfig] = {}
    """Limits of what it may ask of each model or adapter, by name."""


TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


def _named(classes: Any) -> Any:
    """Name a class by its key, and refuse fields that a dataclass would ignore. A field that is null is left out."""
    if not isinstance(classes, dict):
        return classes
    known = {field.name for field in fields(Slo)}
    for name, given in classes.items():
        if isinstance(given, dict) and (unknown := sorted(set(given) - known)):
            raise ValueError(f"{name}.{unknown[0]} is unknown")
    return {
        name: {key: value for key, value in {**slo, "name": name}.items() if value is not None}
        if isinstance(slo, dict)
        else slo
        for name, slo in classes.items()
    }


SloClasses = Annotated[Mapping[str, Slo], BeforeValidator(_named)]


class LiveConfig(BaseModel):
    """What may change while the cluster runs."""

    model_config = _FROZEN

    slo_classes: SloClasses = {}
    tenants: Mapping[TenantName, TenantConfig] = {}
    model_limits: Mapping[str, LimitsConfig] = {}

"""The table of models: what each row has of its own, laid over what the rest of the configuration says for all."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from core.config.adapter_config import NAME, named_paths
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.config.cluster_config import ClusterConfig

ModelName = Annotated[str, Field(pattern=f"^{NAME}$")]
_NAMED_BY_ROW = ("path", "name", "aliases")


def written_rows(given: Any) -> Any:
    """Take texts `NAME=PATH`, and a path alone, for the rows that they mean."""
    given = named_paths(given, "models")
    if not isinstance(given, Mapping):
        return given
    return {name: {"path": row} if isinstance(row, str) else row for name, row in given.items()}


WrittenRows = BeforeValidator(written_rows)


def slug(name: str) -> str:
    """Return a model's name in the names of processes and files."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def tree_of(config: "ClusterConfig", name: str) -> dict[str, Any]:
    """Return the values of one row's configuration, as somebody would write them for this model alone."""
    row = config.models[name].model_dump(exclude_unset=True)
    named = {"name": name, **{key: row.pop(key) for key in ("path", "aliases") if key in row}}
    shared = config.model_dump(exclude_unset=True, exclude={"models", "residency_groups"})
    merged = _over(shared, _over(row, {"model": named}))
    merged["slo_classes"] = {**config.slo_classes, **config.models[name].slo_classes}
    own_record = "record_path" in row.get("schedule", {})
    if config.schedule.record_path and not own_record:  # one file each: schedulers begin theirs anew
        merged["schedule"]["record_path"] += f".{slug(name)}"
    return merged


def check_models(config: "ClusterConfig") -> None:
    """Check the table as a whole. Raises ConfigError."""
    if not config.models:
        return
    for key in (*_NAMED_BY_ROW, "adapters"):
        if key in config.model.model_fields_set:
            raise ConfigError(f"model.{key} is of one model, and models has a row for each: set it there")
    for tenant, rules in config.tenants.items():
        if unknown := [one for one in rules.models if one not in config.models]:
            raise ConfigError(f"tenants.{tenant}.models: {unknown[0]!r} is not among models")
    for name, row in config.models.items():
        _check_row(config, name, row.model.model_fields_set, row.path, row.slo_classes)
    _check_unique(
        "models has two models called {!r}: give one of them another name or alias",
        (each for name, row in config.models.items() for each in (name, *row.aliases, *row.model.adapters)),
    )
    _check_unique(
        "models has two names that become {!r} in the names of their processes: change one",
        map(slug, config.models),
    )


def _check_row(
    config: "ClusterConfig", name: str, said: set[str], path: str, classes: Mapping[str, Any]
) -> None:
    if not path:
        raise ConfigError(f"models.{name}.path is missing: a folder, a hub id or a GGUF file")
    if twice := [key for key in _NAMED_BY_ROW if key in said]:
        raise ConfigError(
            f"models.{name}.model.{twice[0]}: a row's key is its name, and path and aliases stand in the row itself"
        )
    if unknown := [one for one in classes if one not in config.slo_classes]:
        raise ConfigError(
            f"models.{name}.slo_classes: {unknown[0]!r} is not among slo_classes, where a class is named first"
        )


def _check_unique(message: str, names: Iterable[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(message.format(twice[0]))


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` in place of its own."""
    merged = dict(below)
    for key, value in above.items():
        old: Any = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged

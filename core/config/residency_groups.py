"""The groups of models that share memory, and what they cannot go with."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING

from pydantic import BaseModel

from core.config.model_rows import slug
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.config.cluster_config import ClusterConfig


def models_of(config: "ClusterConfig", group: str) -> tuple[str, ...]:
    """Return the names of a group's models, in the table's order."""
    return tuple(row.model.name for row in config.rows if row.schedule.residency.group == group)


@dataclass(frozen=True, slots=True)
class Colocation:
    """The models whose instances are in the same processes on Ray: those of a group, or one model."""

    name: str
    """The group's, or the model's."""
    rows: tuple["ClusterConfig", ...]
    awake_models: int = 1

    @property
    def first(self) -> "ClusterConfig":
        """Any of them, for what all have alike."""
        return self.rows[0]

    def most(self, amount: Callable[["ClusterConfig"], int]) -> int:
        """Return the most that its models can have at once, of what each has so much."""
        return sum(sorted(map(amount, self.rows))[-self.awake_models :])


def colocations_of(config: "ClusterConfig") -> tuple[Colocation, ...]:
    """Return them in the table's order, a group where its first model stands."""
    found: dict[tuple[str, str], list[ClusterConfig]] = {}
    for row in config.rows:
        group = row.schedule.residency.group if config.residency_groups else ""
        found.setdefault((group, "" if group else row.model.name), []).append(row)
    return tuple(
        Colocation(group or name, tuple(rows), config.residency_groups[group].awake_models if group else 1)
        for (group, name), rows in found.items()
    )


def part_of(config: "ClusterConfig", name: str) -> "ClusterConfig":
    """Return the configuration with one row of its table, or with the rows of one group. Raises ConfigError."""
    found = {each.name: each for each in colocations_of(config)} if config.models else {}
    if name not in found:
        raise ConfigError(f"{name!r} is no row of models and no group of rows; these are: {', '.join(found)}")
    rows = {row.model.name: config.models[row.model.name] for row in found[name].rows}
    return config.model_copy(update={"models": rows})


_ALIKE = (
    "any_role",
    "prefill_instances",
    "decode_instances",
    "prefill",
    "decode",
    "cpus_per_instance",
    "engine.device",
)


def check_colocations(config: "ClusterConfig") -> None:
    """Check that the models of each group can be in the same processes, as they are on Ray. Raises ConfigError."""
    for models in colocations_of(config):
        if models.name not in config.residency_groups:
            continue
        where, first = f"residency_groups.{models.name}", models.first
        if any(slug(models.name) == slug(row.model.name) for row in config.rows):
            raise ConfigError(f"{where} and a model have one name in the names of processes: change one")
        for key, row in product(_ALIKE, models.rows):
            if (own := attrgetter(key)(row)) != (other := attrgetter(key)(first)):
                raise ConfigError(
                    f"models.{row.model.name}: {key} is {_said(own)}, and {_said(other)} in models.{first.model.name}. On Ray "
                    f"they share processes ({where}): make them equal"
                )
        for name, pool in (("prefill", first.prefill), ("decode", first.decode)):
            if pool.shares_card:
                raise ConfigError(
                    f"{name}.gpu_share must be 1 in a group ({where}): its models share the whole GPU"
                )
            if pool.num_ranks > 1 and models.awake_models > 1:
                raise ConfigError(
                    f"{where}.awake_models must be 1 on Ray where an instance has several ranks ({name} has {pool.num_ranks}): "
                    "the ranks of the models take turns in one placement group"
                )


def _said(value: object) -> str:
    """Return a value as it is written, of a section what is set in it."""
    return str(value.model_dump(exclude_unset=True)) if isinstance(value, BaseModel) else repr(value)


def check_groups(config: "ClusterConfig") -> None:
    """Check each model against its group, and each group as a whole. Raises ConfigError."""
    if not config.residency_groups and not config.models:
        return
    if not config.models:
        raise ConfigError("residency_groups is for several models: give models a row for each")
    for row in config.rows:
        _check_row(config, row)
    for name, group in config.residency_groups.items():
        num_models = len(models_of(config, name))
        if num_models <= group.awake_models:
            raise ConfigError(
                f"residency_groups.{name} has memory for {group.awake_models} models at once, and {num_models} are in it: none "
                f"would ever make way. Name it in schedule.residency.group of more rows, or leave it out"
            )


def _check_row(config: "ClusterConfig", row: "ClusterConfig") -> None:
    residency, where = row.schedule.residency, f"models.{row.model.name}.schedule.residency"
    if not residency.group:
        return
    if residency.group not in config.residency_groups:
        raise ConfigError(f"{where}.group: {residency.group!r} is not among residency_groups")
    if residency.mode != "on_demand":
        raise ConfigError(f"{where}.group needs the mode on_demand (it is {residency.mode})")
    if row.scaling.enabled:
        raise ConfigError(
            f"{where}.group: its memory is for so many instances, so scaling.enabled must be false"
        )
    if row.serve.schedulers > 1:
        raise ConfigError(
            f"{where}.group needs one scheduler for each model (serve.schedulers is {row.serve.schedulers})"
        )

"""The groups of models that share memory, and what they cannot go with."""

from typing import TYPE_CHECKING

from core.errors import ConfigError

if TYPE_CHECKING:
    from core.config.cluster_config import ClusterConfig


def models_of(config: "ClusterConfig", group: str) -> tuple[str, ...]:
    """Return the names of a group's models, in the table's order."""
    return tuple(row.model.name for row in config.rows if row.schedule.residency.group == group)


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

"""What the deployments of an application are called: where it has several models, each model's own end with its name, and those
of a group of models with the group's."""

from core.config.cluster_config import ClusterConfig
from core.config.model_rows import slug
from core.config.residency_groups import colocations_of


def deployment_suffix(config: ClusterConfig, name: str) -> str:
    """Return what the names of a model's deployments, or of a group's pools, end with; nothing where `config` has no table of
    models."""
    return f"-{slug(name)}" if config.models else ""


def deployments_of(config: ClusterConfig) -> list[str]:
    """Return the names of all deployments. A model without instances for prefill alone has no pool of them, and may name it."""
    names = ["Ingress", *(f"Group-{slug(name)}" for name in config.residency_groups)]
    for each in colocations_of(config):
        names += [f"Scheduler{deployment_suffix(config, row.model.name)}" for row in each.rows]
        names += [f"{kind}{deployment_suffix(config, each.name)}" for kind in ("PrefillPool", "DecodePool")]
    return names


def kind_and_suffix(deployment: str) -> tuple[str, str]:
    """Return `Scheduler`, say, and the suffix."""
    kind, dash, model = deployment.partition("-")
    return kind, dash + model

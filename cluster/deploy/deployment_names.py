"""What the deployments of an application are called: where it has several models, each model's own end with its name."""

from core.config.cluster_config import ClusterConfig
from core.config.model_rows import slug

_OF_EACH_MODEL = ("Scheduler", "PrefillPool", "DecodePool")


def deployment_suffix(config: ClusterConfig, row: ClusterConfig) -> str:
    """Return what the names of a model's deployments end with; nothing where `config` has no table of models."""
    return f"-{slug(row.model.name)}" if config.models else ""


def deployments_of(config: ClusterConfig) -> list[str]:
    """Return the names of all deployments. A model without instances for prefill alone has no pool of them, and may name it."""
    suffixes = [deployment_suffix(config, row) for row in config.rows]
    return ["Ingress", *(kind + suffix for suffix in suffixes for kind in _OF_EACH_MODEL)]


def kind_and_suffix(deployment: str) -> tuple[str, str]:
    """Return `Scheduler`, say, and the suffix."""
    kind, dash, model = deployment.partition("-")
    return kind, dash + model

"""`baton pods`: the requests and limits that the pods of a Helm values file need, as values to paste."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from baton.cli.yaml_file import read_yaml
from core.config.cluster_config import ClusterConfig, load
from core.config.pools import Pool, pools_of
from core.config.residency_groups import Colocation, colocations_of
from core.errors import ConfigError


def pods(
    values: Annotated[
        Path, typer.Argument(help="Values of the Helm chart (charts/examples/production.yaml).")
    ],
) -> None:
    """Print the CPU and memory that prefill and decode pods need, worked out from the model's configuration."""
    given = read_yaml(values)
    print(yaml.safe_dump(resources_of(given), sort_keys=False), end="")


def resources_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of the chart with `resources` alone. Raises ConfigError."""
    first = {name: values.get(name) or {} for name in ("config", "prefill", "decode")}
    if first["config"].get("models"):
        return {"modelPods": _of_table(first, values.get("modelPods") or {})}
    made = dict(_of_model(first))
    for name, own in (values.get("models") or {}).items():
        merged = {key: _merged(first[key], (own or {}).get(key) or {}) for key in first}
        made.setdefault("models", {})[name] = dict(_of_model(merged))
    return made


def _of_table(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources of each row's pods, and of those of a group's rows. `own`: what differs from `values`, by name."""
    made: dict[str, Any] = {}
    for models in colocations_of(load(values["config"], {})):
        pods = {
            role: _merged(values[role], (own.get(models.name) or {}).get(role) or {})
            for role in ("prefill", "decode")
        }
        made[models.name] = dict(_of_pods(models, pods))
    return made


def _of_model(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    [models] = colocations_of(load(values["config"], {}).only)
    return _of_pods(models, values)


def _of_pods(models: Colocation, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    from cluster.preflight.pod_memory import memory_of  # noqa: PLC0415 (PyTorch, which --help does not need)

    config = models.first
    pools = [pool for pool in pools_of(config) if pool.num_instances]
    groups = [[pool] for pool in pools] if not config.decode.shares_card else [pools]
    for group in groups:
        name = group[-1].name
        pod: Mapping[str, Any] = values[name]
        num_each, on_gpus = _instances_of(pod, group[-1]), bool(pod.get("gpusPerPod", 0))
        needed = memory_of(models, [pool.name for pool in group], num_each, on_gpus=on_gpus)
        memory = f"{needed.num_gib}Gi"
        cpus = sum(_cpus(config, pool) for pool in group) * num_each + 1
        resources = {"requests": {"cpu": cpus, "memory": memory}, "limits": {"memory": memory}}
        yield name, {"resources": resources}


def _instances_of(pod: Mapping[str, Any], pool: Pool) -> int:
    """Return how many instances the chart puts in a pod."""
    num_gpus, parallel = int(pod.get("gpusPerPod", 0)), pool.parallel
    if not num_gpus:
        return int(pod.get("instancesPerPod", 1))
    if parallel.shares_card or parallel.num_ranks > num_gpus:
        if parallel.num_ranks > num_gpus * parallel.hosts:
            raise ConfigError(
                f"{pool.name}: an instance has {parallel.num_ranks} ranks, and {pool.name}.gpusPerPod is {num_gpus}"
            )
        return 1
    return min(pool.num_instances, num_gpus // parallel.num_ranks)


def _cpus(config: ClusterConfig, pool: Pool) -> int:
    """Return the processors that an instance keeps busy in a pod; at least what it asks of Ray."""
    num_ranks = -(-pool.parallel.num_ranks // pool.parallel.hosts)
    return math.ceil(
        num_ranks * max(config.cpus_per_instance, config.engine.num_threads, 1) + (num_ranks > 1)
    )


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep merge, as Helm's."""
    both = dict(base)
    for key, value in over.items():
        old = both.get(key)
        both[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both

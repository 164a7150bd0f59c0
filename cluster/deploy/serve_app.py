"""The Ray Serve application: Ingress, and for each model Scheduler, PrefillPool, DecodePool. A group's models share both pools,
and a Group.

Ray places, watches and replaces these processes. Requests, tokens and KV travel between them over Baton's own mail and
transports, and HTTP comes straight to the ingress; nothing of a request passes through Serve."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from cluster.deploy.clear_ways import check_clear_ways
from cluster.deploy.cluster_key import cluster_key
from cluster.deploy.config_paths import check_paths
from cluster.deploy.deployment_names import deployment_suffix
from cluster.deploy.group_deployment import Group
from cluster.deploy.ingress_deployment import Ingress
from cluster.deploy.pool_deployments import DecodePool, PrefillPool
from cluster.deploy.rank_bundles import bundles_of, strategy_of
from cluster.deploy.scheduler_deployment import Scheduler
from core.config.cluster_config import ClusterConfig, load
from core.config.parallel_config import ParallelConfig
from core.config.residency_groups import check_colocations, colocations_of

_LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""The environment of every replica. A Ray started for this application has it from the beginning, since Ray starts new processes
for an environment of their own."""
_MARGIN_S = 5.0
"""The time beyond a process's own deadline after which Serve kills it."""


def build(args: dict[str, Any]) -> serve.Application:
    """For Serve's YAML: `import_path: cluster.deploy.serve_app:build`, with the configuration's tree as `args`.

    The environment of the node that builds (BATON_...) wins over `args`. Raises ConfigError, naming the key."""
    config = load(args, os.environ)
    if _is_alone():
        check_paths(config)
    return build_application(config, cluster_key(config), one_host=False)


def _is_alone() -> bool:
    """Return whether all processes will be on this host, so that it must have every path. A head without processors has none."""
    nodes = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    return len(nodes) == 1 and nodes[0]["Resources"].get("CPU", 0) >= 1


def build_application(
    config: ClusterConfig, key: bytes, environment: Mapping[str, str] = ENVIRONMENT, *, one_host: bool
) -> serve.Application:
    """The bound Serve application. `key` is the cluster key that authenticates its processes to each other.

    `one_host`: all of them run on this machine, so they need not listen to any other. `environment`: what replicas have besides
    that of Ray's processes. Raises ConfigError."""
    check_colocations(config)
    if not one_host:
        check_clear_ways(config, os.environ)
    options = partial(_options, config, {"env_vars": environment} if environment else {})
    schedulers: dict[str, Any] = {}
    bound: list[Any] = []
    for models in colocations_of(config):
        suffix, first, group = deployment_suffix(config, models.name), models.first, None
        if models.name in config.residency_groups:
            owner = options(Group, suffix, 1, 0.1, surge_percent=0)
            group = owner.bind(config, models.name, key, one_host=one_host)
        for row in models.rows:
            named = deployment_suffix(config, row.model.name)
            scheduler = options(Scheduler, named, row.num_scheduler_processes, 0.1, surge_percent=100)
            schedulers[row.model.name] = scheduler.bind(row, key, group, pools=suffix, one_host=one_host)
        own = [schedulers[row.model.name] for row in models.rows]
        pools = [_pool(options, DecodePool, suffix, first, first.decode_instances, first.decode)]
        if first.prefill_instances:
            pools.append(_pool(options, PrefillPool, suffix, first, first.prefill_instances, first.prefill))
        bound += [pool.bind(list(models.rows), key, own, one_host=one_host) for pool in pools]
    in_order = [schedulers[row.model.name] for row in config.rows]
    ingress = options(Ingress, "", config.ingress_instances, 0.1, surge_percent=100)
    return ingress.bind(config, key, in_order, bound, one_host=one_host)


def _pool(
    options: Callable[..., Any],
    deployment: Any,
    suffix: str,
    config: ClusterConfig,
    num_replicas: int,
    mesh: ParallelConfig,
) -> Any:
    """Return a pool's deployment. Where an instance has several ranks, these ask for what they need, not its replica."""
    if mesh.num_ranks == 1:
        num_gpus = mesh.gpu_share if config.engine.device == "cuda" else 0.0
        return options(deployment, suffix, num_replicas, config.cpus_per_instance, num_gpus=num_gpus)
    placed = options(deployment, suffix, num_replicas, 0)
    return placed.options(
        placement_group_bundles=bundles_of(config, mesh), placement_group_strategy=strategy_of(mesh)
    )


def _options(
    config: ClusterConfig,
    environment: Mapping[str, Any],
    deployment: Any,
    suffix: str,
    num_replicas: int,
    num_cpus: float,
    *,
    num_gpus: float = 0.0,
    surge_percent: int = 0,
) -> Any:
    """Return a deployment's options. `surge_percent` is how many new replicas may start before old ones stop when a new version
    is deployed. Accelerators are seldom to spare, so a pool's replicas make room first."""
    return deployment.options(
        name=f"{deployment.name}{suffix}",
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus, "runtime_env": environment},
        logging_config=_LOGGING,
        health_check_period_s=1,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=config.serve.drain_notice_s + config.serve.drain_timeout_s + _MARGIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_ongoing_requests=4096,
        max_surge_percent=surge_percent,
    )

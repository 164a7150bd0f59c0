"""Serve's YAML with Baton in it, read strictly: a misspelt key is refused here, while Serve itself would ignore it."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.schema import (
    DeploymentSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from cluster.deploy.deployment_names import deployment_suffix, deployments_of
from cluster.deploy.rank_bundles import check_overrides
from core.config.cluster_config import ClusterConfig, load
from core.config.parallel_config import ParallelConfig
from core.config.residency_groups import colocations_of
from core.errors import ConfigError

BUILDER = "cluster.deploy.serve_app:build"


def check_serve_file(content: Mapping[str, Any]) -> tuple[ServeDeploySchema, dict[str, ClusterConfig]]:
    """Return what Serve takes, and the configuration of each of Baton's applications by name. Raises ConfigError, naming the
    key."""
    schema = _read(content)
    configs = {app.name: load(app.args, {}) for app in schema.applications if app.import_path == BUILDER}
    for application in schema.applications:
        _check_names(application, configs.get(application.name))
    for application in schema.applications:
        if config := configs.get(application.name):
            _check_pools(application, config)
            _check_schedulers(application, config)
    for application in schema.applications:
        if config := configs.get(application.name):
            _check_scaling(application, config)
    if not configs:
        raise ConfigError(f"no application has import_path: {BUILDER}")
    if schema.proxy_location != "Disabled":
        raise ConfigError(
            "set proxy_location: Disabled; Serve's proxy would take the port that Baton listens on"
        )
    return schema, configs


def _read(content: Mapping[str, Any]) -> ServeDeploySchema:
    """Serve itself accepts keys that it does not know, in applications and below."""
    _check_keys(content, ServeDeploySchema, "")
    for i, application in enumerate(content.get("applications", ())):
        where = f"applications.{i}"
        _check_keys(application, ServeApplicationSchema, where)
        for j, deployment in enumerate(application.get("deployments", ())):
            here = f"{where}.deployments.{j}"
            _check_keys(deployment, DeploymentSchema, here)
            _check_keys(
                deployment.get("ray_actor_options", {}), RayActorOptionsSchema, f"{here}.ray_actor_options"
            )
    try:
        return ServeDeploySchema.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None


def _check_names(application: ServeApplicationSchema, config: ClusterConfig | None) -> None:
    for name in (deployment.name for deployment in application.deployments):
        if config and name not in (names := deployments_of(config)):
            raise ConfigError(f"{application.name}: there is no deployment {name!r}, only {', '.join(names)}")


def _check_scaling(application: ServeApplicationSchema, config: ClusterConfig) -> None:
    if any(row.scaling.enabled for row in config.rows) and not application.external_scaler_enabled:
        raise ConfigError(
            f"{application.name}: scaling.enabled needs external_scaler_enabled: true beside import_path"
        )


def _check_pools(application: ServeApplicationSchema, config: ClusterConfig) -> None:
    pools = {
        f"{kind}{deployment_suffix(config, each.name)}": pool
        for each in colocations_of(config)
        for kind, pool in (("PrefillPool", each.first.prefill), ("DecodePool", each.first.decode))
    }
    for deployment in application.deployments:
        pool = pools.get(deployment.name)
        if pool is None:
            continue
        where, given = f"{application.name}: {deployment.name}", deployment.model_dump(exclude_unset=True)
        if pool.num_ranks > 1:
            check_overrides(where, given, pool)
        if pool.shares_card and "ray_actor_options" in given:
            _check_share(where, given["ray_actor_options"].get("num_gpus", 0), pool)


def _check_share(where: str, num_gpus: float, pool: ParallelConfig) -> None:
    """Check that Ray is asked for as much of a card as the instance takes."""
    if num_gpus != pool.gpu_share:
        raise ConfigError(
            f"{where}: num_gpus in ray_actor_options is {num_gpus:g}, and an instance's gpu_share {pool.gpu_share:g}"
        )


def _check_schedulers(application: ServeApplicationSchema, config: ClusterConfig) -> None:
    """Check that there are as many schedulers as the configuration says: processes look for that many."""
    num_wanted = {
        f"Scheduler{deployment_suffix(config, row.model.name)}": row.num_scheduler_processes
        for row in config.rows
    }
    for deployment in application.deployments:
        given = deployment.model_dump(exclude_unset=True).get("num_replicas")
        wanted = num_wanted.get(deployment.name)
        if wanted and given not in (None, wanted):
            raise ConfigError(
                f"{application.name}: num_replicas of {deployment.name} is {given}, and serve.schedulers "
                f"{config.serve.schedulers} needs {wanted}. Leave num_replicas out"
            )


def _check_keys(given: Any, model: type[BaseModel], where: str) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where or 'the file'} must hold keys and values")
    for key in given:
        if key not in model.model_fields:
            raise ConfigError(f"unknown key {f'{where}.{key}'.lstrip('.')!r}")

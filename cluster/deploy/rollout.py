"""The processes of a running application replaced, one deployment after the other, so that they run what their nodes have now.

Serve replaces a deployment's replicas when its actors' options change; here a variable of their environment does, which nobody
reads. A replica that is replaced leaves as always: an ingress with notice, an instance's sequences with their KV."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from ray.serve.schema import ServeDeploySchema

from cluster.deploy.rest import ServeRest
from core.errors import ConfigError

ORDER = ("PrefillPool", "DecodePool", "Scheduler", "Ingress")
_STAMP = "BATON_ROLLOUT"


def rollout(
    rest: ServeRest,
    app: str,
    deployments: tuple[str, ...],
    stamp: str,
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    """Each of `deployments` that the application has, whole, before the next begins. `stamp` must be new. Raises ConfigError."""
    for deployment in deployments:
        details = rest.details()
        if deployment not in _application(details, app)["deployments"]:
            continue
        old = replica_ids(details, app, deployment)
        say(f"{deployment}: replacing {len(old)}")
        rest.deploy(restarted(details, app, deployment, stamp))
        rest.wait(
            [app],
            timeout_s,
            say,
            lambda now, deployment=deployment, old=old: not old & replica_ids(now, app, deployment),
        )


def restarted(details: Mapping[str, Any], app: str, deployment: str, stamp: str) -> ServeDeploySchema:
    """What runs now, as a file would say it, but for the stamp in `deployment`'s environment. Pure."""
    _application(details, app)
    applications = [deepcopy(found["deployed_app_config"]) for found in details["applications"].values()]
    config = next(found for found in applications if found["name"] == app)
    overrides: list[dict[str, Any]] = config.setdefault("deployments", [])
    override = next((found for found in overrides if found["name"] == deployment), None)
    if override is None:
        overrides.append(override := {"name": deployment})
    running = details["applications"][app]["deployments"][deployment]["deployment_config"]
    options = deepcopy(running.get("ray_actor_options") or {})
    options.setdefault("runtime_env", {}).setdefault("env_vars", {})[_STAMP] = stamp
    override["ray_actor_options"] = options
    return ServeDeploySchema.model_validate(
        {"proxy_location": details["proxy_location"], "applications": applications}
    )


def replica_ids(details: Mapping[str, Any], app: str, deployment: str) -> set[str]:
    replicas = details["applications"][app]["deployments"][deployment]["replicas"]
    return {replica["replica_id"] for replica in replicas}


def _application(details: Mapping[str, Any], app: str) -> Mapping[str, Any]:
    found = details["applications"].get(app)
    if found is None:
        raise ConfigError(
            f"there is no application {app!r}, only: {', '.join(details['applications']) or 'none'}"
        )
    if any(each["deployed_app_config"] is None for each in details["applications"].values()):
        raise ConfigError(
            "not every application was deployed from a file: stop `baton serve`, use `baton deploy`"
        )
    return found

"""Replaces the processes of a running application, one deployment after the other, so that they run what their nodes have now.

Serve replaces a deployment's replicas when its actors' options change. Here a variable of their environment changes, a stamp that
nothing reads. A replica that is replaced leaves as always: an ingress with notice, an instance's sequences with their KV.

A file has no stamps. Sent as it is after a rollout, it would change the options back and replace everything once more.
`with_stamps` puts them into it wherever nothing else asks for a replacement."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Final

from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from cluster.deploy.deployment_names import kind_and_suffix
from cluster.deploy.serve_rest import ServeRest
from core.errors import ConfigError

ORDER = ("PrefillPool", "DecodePool", "Group", "Scheduler", "Ingress")
_STAMP: Final = "BATON_ROLLOUT"
_AS_BUILT: Final = "BATON_ROLLOUT_AS_BUILT"
"""A variable that says that the options beside the stamp are those of `serve_app`, since the file said nothing of them."""
_REPLACES_ALL: Final = ("import_path", "runtime_env", "args")
"""Options for which Serve replaces all replicas of the application, since it takes a change of one for other code."""


def rollout(
    rest: ServeRest,
    app: str,
    deployments: tuple[str, ...],
    stamp: str,
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    """Replace each of `deployments` that the application has, whole, before the next begins. `PrefillPool`, say, is that of every
    model. `stamp` must be new. Raises ConfigError."""
    there = _application(rest.details(), app)["deployments"]
    for deployment in _chosen(deployments, there):
        details = rest.details()
        old = replica_ids(details, app, deployment)
        say(f"{deployment}: replacing {len(old)}")
        rest.deploy(restarted(details, app, deployment, stamp))
        rest.wait(
            [app],
            timeout_s,
            say,
            lambda now, deployment=deployment, old=old: not old & replica_ids(now, app, deployment),
        )


def _chosen(wanted: Iterable[str], there: Iterable[str]) -> list[str]:
    return [name for one in wanted for name in there if one in (name, kind_and_suffix(name)[0])]


def restarted(details: Mapping[str, Any], app: str, deployment: str, stamp: str) -> ServeDeploySchema:
    """Return what runs now, in a file's form, but for the stamp in `deployment`'s environment."""
    _application(details, app)
    applications = [deepcopy(found["deployed_app_config"]) for found in details["applications"].values()]
    override = _override(next(found for found in applications if found["name"] == app), deployment)
    marks = {_STAMP: stamp}
    if "ray_actor_options" not in override:
        running = details["applications"][app]["deployments"][deployment]["deployment_config"]
        override["ray_actor_options"] = deepcopy(running.get("ray_actor_options") or {})
        marks[_AS_BUILT] = "1"
    options = override["ray_actor_options"]
    options.setdefault("runtime_env", {}).setdefault("env_vars", {}).update(marks)
    return ServeDeploySchema.model_validate(
        {"proxy_location": details["proxy_location"], "applications": applications}
    )


def with_stamps(schema: ServeDeploySchema, details: Mapping[str, Any]) -> ServeDeploySchema:
    """Return `schema` with the stamps of what runs in each deployment that it would otherwise leave as it is."""
    content = schema.model_dump(mode="json", exclude_unset=True)
    for application, wanted in zip(schema.applications, content["applications"], strict=True):
        running = details["applications"].get(application.name, {}).get("deployed_app_config")
        if running is None:
            continue
        deployed = ServeApplicationSchema.model_validate(running)
        if any(getattr(application, name) != getattr(deployed, name) for name in _REPLACES_ALL):
            continue
        said = {each["name"]: each.get("ray_actor_options") for each in wanted.get("deployments", ())}
        for old in deployed.model_dump(mode="json", exclude_unset=True).get("deployments", ()):
            stamped = old.get("ray_actor_options", {})
            if _STAMP in _variables(stamped) and _unstamped(said.get(old["name"])) == _unstamped(stamped):
                _override(wanted, old["name"])["ray_actor_options"] = stamped
    return ServeDeploySchema.model_validate(content)


def _override(application: dict[str, Any], deployment: str) -> dict[str, Any]:
    """Return what the application's file says of the deployment; it is added where the file says nothing."""
    overrides: list[dict[str, Any]] = application.setdefault("deployments", [])
    found = next((each for each in overrides if each["name"] == deployment), None)
    if found is None:
        overrides.append(found := {"name": deployment})
    return found


def _unstamped(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what the deployed file said, without stamps. None means that it said nothing, and these were built."""
    if options is None or _AS_BUILT in _variables(options):
        return None
    variables = {name: value for name, value in _variables(options).items() if name != _STAMP}
    return {**options, "runtime_env": {**options.get("runtime_env", {}), "env_vars": variables}}


def _variables(options: Mapping[str, Any]) -> Mapping[str, str]:
    return options.get("runtime_env", {}).get("env_vars", {})


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

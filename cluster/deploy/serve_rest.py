"""Serve's REST interface, as far as Baton uses it: sends what shall run, and follows it until it does."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import requests
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.exceptions import AuthenticationError
from ray.serve.schema import ServeDeploySchema

from cluster.deploy.deployment_phases import failure_cause
from core.errors import ConfigError

_POLL_S = 0.5
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


class ServeRest:
    """The Serve of the Ray cluster whose dashboard is at `address`. Raises ConfigError where nothing answers there."""

    def __init__(self, address: str) -> None:
        try:
            self._client = ServeSubmissionClient(address)
        except AuthenticationError:
            raise ConfigError(
                f"the Ray cluster at {address} asks for its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or _PATH)"
            ) from None
        except (ConnectionError, RuntimeError, ValueError, requests.RequestException) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"no Ray dashboard at {address}: {reason}") from None

    def deploy(self, schema: ServeDeploySchema) -> None:
        """Deploy. Returns once Serve has accepted it. Raises ConfigError with Serve's own words where it does not."""
        try:
            self._client.deploy_applications(schema.model_dump(mode="json", exclude_unset=True))
        except RuntimeError as error:
            raise ConfigError(f"Serve refuses it: {' '.join(str(error).split())}") from None

    def details(self) -> dict[str, Any]:
        """Serve's ServeInstanceDetails."""
        return self._client.get_serve_details()

    def applications(self) -> dict[str, Any]:
        """Return what runs, by application name, as in Serve's ApplicationDetails."""
        return self.details()["applications"]

    def wait(
        self,
        names: list[str],
        timeout_s: float,
        say: Callable[[str], None],
        done: Callable[[Mapping[str, Any]], bool] = lambda _: True,
    ) -> None:
        """Wait until each of `names` runs as it was sent last and the details are `done`. `say` is called with every change.
        Raises ConfigError."""
        deadline, said = time.monotonic() + timeout_s, ""
        found: dict[str, Any] = {}
        while time.monotonic() < deadline:
            details = self.details()
            found = {name: app for name, app in details["applications"].items() if name in names}
            if (summary := summarize(found)) != said:
                said = summary
                say(summary)
            for name, app in found.items():
                if app["status"] in _FAILED:
                    raise ConfigError(f"{name}: {app['status']}: {_cause(app)}")
            running = len(found) == len(names) and all(app["status"] == "RUNNING" for app in found.values())
            if running and done(details):
                return
            time.sleep(_POLL_S)
        raise ConfigError(f"not running after {timeout_s:g} s: {said}{_waits_for(found)}")


def summarize(applications: Mapping[str, Any]) -> str:
    """Return one line: each deployment with its running and wanted replicas."""
    parts = [
        f"{name} {_num_running(deployment)}/{deployment['target_num_replicas']}"
        for app in applications.values()
        for name, deployment in app["deployments"].items()
    ]
    return ", ".join(parts) or "building"


def _num_running(deployment: Mapping[str, Any]) -> int:
    return sum(replica["state"] == "RUNNING" for replica in deployment["replicas"])


def _waits_for(applications: Mapping[str, Any]) -> str:
    """Return what Serve says of each deployment that is not whole, such as the resources that no node has free. It may be
    empty."""
    deployments = [deployment for app in applications.values() for deployment in app["deployments"].values()]
    return "".join(
        f"\n  {deployment['name']}: {deployment['message'].strip()}"
        for deployment in deployments
        if _num_running(deployment) < deployment["target_num_replicas"] and deployment["message"].strip()
    )


def _cause(app: Mapping[str, Any]) -> str:
    deployments: Mapping[str, Any] = app["deployments"]
    return failure_cause([app["message"], *(deployment["message"] for deployment in deployments.values())])

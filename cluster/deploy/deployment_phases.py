"""Follows an application while Serve starts it: what runs already, and why something does not."""

import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from cluster.deploy.deployment_names import kind_and_suffix
from core.errors import ConfigError, UnsupportedModel

_PHASES = {
    "Group": "group",
    "Scheduler": "scheduler",
    "PrefillPool": "pools",
    "DecodePool": "pools",
    "Ingress": "ingress",
}
_POLL_S = 0.1
_REFUSED_S = 5.0
"""How long a refusal must last: what an earlier process has not given back yet may be there at the next try."""
_REFUSALS = (ConfigError, UnsupportedModel)


def wait_running(app: str, on_phase: Callable[[str], None]) -> None:
    """Wait until all deployments of `app` run. Raises ConfigError where one cannot start."""
    said, refused_at = set[str](), inf
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    while True:
        found = _application(controller, app)
        deployments: dict[str, dict[str, Any]] = found["deployments"]
        starting = {name for name, one in deployments.items() if one["status"] != "HEALTHY"}
        messages = [found["message"], *(one["message"] for one in deployments.values())]
        now = time.monotonic()
        refused_at = min(refused_at, now) if is_refused(messages) else inf
        if found["status"] == "DEPLOY_FAILED" or now - refused_at > _REFUSED_S:
            raise ConfigError(f"the cluster did not start: {failure_cause(messages)}")
        waiting = {phase_of(name) for name in starting}
        for phase in dict.fromkeys(map(phase_of, sorted(deployments, key=_place))):
            if phase not in said | waiting:
                said.add(phase)
                on_phase(phase)
        if found["status"] == "RUNNING":
            return
        time.sleep(_POLL_S)


def phase_of(deployment: str) -> str:
    """Return what runs once this deployment and those beside it do."""
    kind, suffix = kind_and_suffix(deployment)
    return " of ".join(filter(None, (_PHASES[kind], suffix[1:])))


def _place(deployment: str) -> int:
    return [*_PHASES].index(kind_and_suffix(deployment)[0])


def _application(controller: Any, app: str) -> dict[str, Any]:
    """Return what Serve's controller says of `app`. `serve.status` says the same in 24 ms of a processor, which the processes
    that start need; this takes 0.5 ms."""
    details: Any = ray.get(controller.get_serve_instance_details.remote())
    return details["applications"][app]


def is_refused(messages: Iterable[str]) -> bool:
    """Return whether a process has refused the configuration. Serve would start it again and again, for a minute or two."""
    return any(f"core.errors.{one.__name__}" in message for message in messages for one in _REFUSALS)


def failure_cause(messages: Iterable[str]) -> str:
    """Return the line of Serve's message that names the exception, one of ours first. A traceback precedes it."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if "core.errors." in line]
    return (ours or lines or ["no reason given"])[-1]

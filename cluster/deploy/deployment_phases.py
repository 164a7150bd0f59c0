"""Follows an application while Serve starts it: what runs already, and why something does not."""

import time
from collections.abc import Callable, Iterable
from math import inf

from ray import serve

from core.errors import ConfigError, UnsupportedModel

_PHASES = {
    "scheduler": {"Scheduler"},
    "pools": {"PrefillPool", "DecodePool"},
    "ingress": {"Ingress"},
}
_POLL_S = 0.1
_REFUSED_S = 5.0
"""How long a refusal must last: what an earlier process has not given back yet may be there at the next try."""
_REFUSALS = (ConfigError, UnsupportedModel)


def wait_running(app: str, on_phase: Callable[[str], None]) -> None:
    """Wait until all deployments of `app` run. Raises ConfigError where one cannot start."""
    left, refused_at = dict(_PHASES), inf
    while True:
        found = serve.status().applications[app]
        starting = {name for name, one in found.deployments.items() if one.status != "HEALTHY"}
        messages = [found.message, *(one.message for one in found.deployments.values())]
        now = time.monotonic()
        refused_at = min(refused_at, now) if is_refused(messages) else inf
        if found.status == "DEPLOY_FAILED" or now - refused_at > _REFUSED_S:
            raise ConfigError(f"the cluster did not start: {failure_cause(messages)}")
        for phase in [phase for phase, names in left.items() if found.deployments and not names & starting]:
            del left[phase]
            on_phase(phase)
        if found.status == "RUNNING":
            return
        time.sleep(_POLL_S)


def is_refused(messages: Iterable[str]) -> bool:
    """Return whether a process has refused the configuration. Serve would start it again and again, for a minute or two."""
    return any(f"core.errors.{one.__name__}" in message for message in messages for one in _REFUSALS)


def failure_cause(messages: Iterable[str]) -> str:
    """Return the line of Serve's message that names the exception, one of ours first. A traceback precedes it."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if "core.errors." in line]
    return (ours or lines or ["no reason given"])[-1]

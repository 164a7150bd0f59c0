"""Follows an application while Serve starts it: what runs already, and why something does not."""

import time
from collections.abc import Callable, Iterable

from ray import serve

from core.errors import ConfigError

_PHASES = {
    "scheduler": {"Scheduler"},
    "pools": {"PrefillPool", "DecodePool"},
    "ingress": {"Ingress"},
}
_POLL_S = 0.1


def wait_running(app: str, on_phase: Callable[[str], None]) -> None:
    """Wait until all deployments of `app` run. Raises ConfigError where one cannot start."""
    left = dict(_PHASES)
    while True:
        found = serve.status().applications[app]
        starting = {name for name, one in found.deployments.items() if one.status != "HEALTHY"}
        if found.status == "DEPLOY_FAILED":
            messages = [found.message, *(one.message for one in found.deployments.values())]
            raise ConfigError(f"the cluster did not start: {failure_cause(messages)}")
        for phase in [phase for phase, names in left.items() if found.deployments and not names & starting]:
            del left[phase]
            on_phase(phase)
        if found.status == "RUNNING":
            return
        time.sleep(_POLL_S)


def failure_cause(messages: Iterable[str]) -> str:
    """Return the line of Serve's message that names the exception, one of ours first. A traceback precedes it."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if "core.errors." in line]
    return (ours or lines or ["no reason given"])[-1]

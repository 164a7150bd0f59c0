"""Tells the kubelet which pods serve: each process that does has a file with its process id for a name, in a folder of its pod.

The chart's readiness probe of prefill and decode pods asks whether one of these processes lives. So an eviction of the next pod
waits until the one that came in the last one's place has loaded its model. Outside of the chart nothing is written."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

FOLDER = "BATON_SERVING_FOLDER"


def mark_serving(env: Mapping[str, str]) -> None:
    """Say that this process serves. A failure is logged: the pod is then not ready, and serves all the same."""
    if mark := _mark(env):
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            log.warning("Kubernetes cannot be told that this process serves: %s", error)


def unmark_serving(env: Mapping[str, str]) -> None:
    """Say that this process serves no longer. One that is killed need not."""
    if mark := _mark(env):
        mark.unlink(missing_ok=True)


def _mark(env: Mapping[str, str]) -> Path | None:
    return Path(env[FOLDER], str(os.getpid())) if env.get(FOLDER) else None

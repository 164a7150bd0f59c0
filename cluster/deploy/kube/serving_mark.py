"""Tells the kubelet which pods compute: each process that does renews a file in a folder of its pod.

The chart's readiness probe of prefill and decode pods looks for a file that was renewed a moment ago. A process that is stopped,
hangs or is dead renews none. So an eviction of the next pod waits until the one that came in the last one's place has loaded its
model and computes. Outside of the chart nothing is written."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

FOLDER = "BATON_SERVING_FOLDER"
_RENEWED_EVERY_S = 1.0


class ServingMark:
    """This process' file. For one event loop or thread."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._path = Path(env[FOLDER], str(os.getpid())) if env.get(FOLDER) else None
        self._is_failing = False

    def renew(self) -> None:
        """Say that this process computes now. A failure is logged once: the pod is then not ready, and serves all the same."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("Kubernetes cannot be told that this process serves: %s", error)
            self._is_failing = True

    def withdraw(self) -> None:
        """Say that this process computes no longer. One that is killed need not."""
        if self._path is not None:
            with suppress(OSError):  # it becomes old by itself
                self._path.unlink(missing_ok=True)

    async def follow(self, computes: Callable[[], bool]) -> None:
        """Renew the file while `computes` returns True, until this is cancelled. It is for the instance's own loop: one that
        stands still renews nothing."""
        try:
            while self._path is not None:
                if computes():
                    self.renew()
                else:
                    self.withdraw()
                await asyncio.sleep(_RENEWED_EVERY_S)
        finally:
            self.withdraw()

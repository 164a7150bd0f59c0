"""Ollama's `keep_alive`: how long the model stays awake after a request, where it sleeps on demand."""

import re
from math import inf
from typing import Any

from fastapi import Request as HttpRequest

from cluster.ingress.delivery.generator import SleepsAndWakes

_PARTS = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|μs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class ModelLifetime:
    def __init__(self, model: SleepsAndWakes, *, sleeps_on_demand: bool) -> None:
        self._model, self._sleeps_on_demand = model, sleeps_on_demand

    def keep(self, http: HttpRequest, keep_alive: Any) -> None:
        """Take over what a client says of the time after its request, or note that it changes nothing. None: it says nothing."""
        if keep_alive is None:
            return
        if self._sleeps_on_demand:
            self._model.keep_awake(seconds_of(keep_alive))
        else:
            http.state.notes.append("keep_alive: changes nothing, since the model does not sleep on demand")

    async def load(self) -> None:
        """Have the model awake, where requests may wake it. Raises ReplicaLost."""
        if self._sleeps_on_demand and await self._model.is_sleeping():
            await self._model.wake()


def seconds_of(keep_alive: int | float | str) -> float:
    """Return a duration in seconds: a number, or a text such as 1h30m. A negative one is infinite."""
    if not isinstance(keep_alive, str):
        return inf if keep_alive < 0 else float(keep_alive)
    if keep_alive.startswith("-"):
        return inf
    parts = _PARTS.findall(keep_alive)
    return sum(float(number) * _SECONDS[unit] for number, unit in parts) if parts else float(keep_alive)

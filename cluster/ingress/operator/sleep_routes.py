"""vLLM's routes by which an operator has the model sleep and wake up."""

from typing import Literal

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.ingress.delivery.generator import SleepsAndWakes
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.tenants.api_keys import Scope
from core.errors import RequestError
from core.sleep_messages import SleepLevel

_TAGS = {"weights", "kv_cache"}


class SleepQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    level: Literal["1", "2"] = "1"
    """1: weights stay in host memory. 2: they are on disk only."""
    mode: Literal["wait", "keep", "abort"] = "wait"
    """Sequences that run are finished (`wait`), or go on after waking with the same tokens (`keep`)."""
    timeout: str = "60"
    """Seconds for which `wait` waits. Sequences that run even then go on after waking."""
    drop_kv: Literal["true", "false"] = "false"
    """Whether the KV in lower tiers is given up, too."""
    model: str = ""
    """Which of several models it is for: what stands before these routes has chosen by it."""


class SleepRoutes:
    def __init__(self, model: SleepsAndWakes) -> None:
        self._model = model

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/sleep", self.sleep, scope=Scope.OPERATOR),
            HttpRoute("POST", "/wake_up", self.wake, scope=Scope.OPERATOR),
            HttpRoute("GET", "/is_sleeping", self.is_sleeping, scope=Scope.OPERATOR),
        ]

    async def sleep(self, http: HttpRequest) -> Response:
        """Have all instances sleep. Answers when they do."""
        asked = _query(http)
        if asked.mode == "abort":
            raise RequestError(
                "no request is aborted for a sleep: mode=wait finishes them, mode=keep has them go on after waking",
                field="mode",
            )
        level: SleepLevel = 2 if asked.level == "2" else 1
        pauses, drops = asked.mode == "keep", asked.drop_kv == "true"
        await self._model.sleep(level, pauses=pauses, timeout_s=_seconds(asked.timeout), drops=drops)
        return JSONResponse({"is_sleeping": True})

    async def wake(self, http: HttpRequest) -> Response:
        """Wake all instances. Answers when they serve. Weights and KV pool wake up together, whichever `tags` names."""
        if unknown := sorted(set(http.query_params.getlist("tags")) - _TAGS):
            raise RequestError(f"{unknown[0]!r} is no tag: weights and kv_cache are", field="tags")
        await self._model.wake()
        return JSONResponse({"is_sleeping": False})

    async def is_sleeping(self, http: HttpRequest) -> Response:
        return JSONResponse({"is_sleeping": await self._model.is_sleeping()})


def _query(http: HttpRequest) -> SleepQuery:
    """Raises RequestError."""
    try:
        return SleepQuery.model_validate(dict(http.query_params))
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        raise RequestError(f"{field}={http.query_params.get(field)!r}: {first['msg']}", field=field) from None


def _seconds(text: str) -> float:
    """Raises RequestError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise RequestError(f"timeout is {text!r}: give seconds, from 0 to 3600", field="timeout")
    return seconds

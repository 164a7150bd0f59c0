"""What the API answers: a table of routes."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel

from cluster.ingress.tenants.api_keys import Scope


class HttpRoute(NamedTuple):
    method: str
    path: str
    handler: Callable[[HttpRequest], Awaitable[Response]]
    body: type[BaseModel] | None = None
    """The body that the route reads. /openapi.json describes it."""
    scope: Scope = Scope.INFERENCE
    """What the route needs of a key."""

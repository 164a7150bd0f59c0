"""Serves /version, and /openapi.json: the routes, and the bodies that they read."""

import re
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.http.http_route import HttpRoute

_REF = "#/components/schemas/{model}"


class Description:
    """The description, made when it is first asked for: a dozen schemas take a while, and an ingress starts without them."""

    def __init__(self, routes: Sequence[HttpRoute]) -> None:
        self._routes = [*routes, *self.routes()]

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("GET", "/version", self.version),
            HttpRoute("GET", "/openapi.json", self.describe),
        ]

    async def version(self, http: HttpRequest) -> Response:
        return JSONResponse({"version": server_version()})

    async def describe(self, http: HttpRequest) -> Response:
        return JSONResponse(self._document)

    @cached_property
    def _document(self) -> dict[str, Any]:
        return described(self._routes, server_version())


def server_version() -> str:
    """Return the version; `unknown` where Baton runs from a folder and was never installed."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown"


def described(routes: Sequence[HttpRoute], release: str) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        operation: dict[str, Any] = {
            "summary": (route.handler.__doc__ or route.handler.__name__.replace("_", " ")).splitlines()[0],
            "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_')}",
            "responses": {"default": {"description": "JSON, or a stream where one is asked for"}},
        }
        if names := re.findall(r"\{(\w+)\}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if route.body is not None:
            schema = route.body.model_json_schema(ref_template=_REF)
            schemas |= schema.pop("$defs", {})
            schemas[route.body.__name__] = schema
            content = {"application/json": {"schema": {"$ref": _REF.format(model=route.body.__name__)}}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": release},
        "paths": paths,
        "components": {"schemas": schemas},
    }

"""vLLM's routes by which an operator loads and unloads adapters while the server runs.

They are off unless the configuration names folders: what is loaded is a path on the server's disk."""

import asyncio
from collections.abc import Callable
from typing import Annotated

from fastapi import Request as HttpRequest
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from cluster.ingress.bodies.body_model import Strict
from cluster.ingress.delivery.generator import LoadsAdapters
from cluster.ingress.generation.answering import Answering
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.tenants.api_keys import Scope
from core.config.adapter_config import ServedAdapter
from core.errors import ConfigError, RequestError

Describe = Callable[[str, str], ServedAdapter]
"""(name, path) -> the adapter, as it lies there. Raises ConfigError for one that may not be loaded. It reads files."""


class LoadAdapterRequest(Strict):
    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    """Put it in the place of one that has this name."""
    model: str | None = None
    """The model that it is for, where there are several; left out: the first."""


class UnloadAdapterRequest(Strict):
    lora_name: Annotated[str, Field(min_length=1)]
    lora_int_id: int | None = None
    """vLLM's own number, which says nothing here."""

    @property
    def asked_model(self) -> str:
        """The name of an adapter, which is one of its model's."""
        return self.lora_name


class AdapterRoutes:
    def __init__(self, answering: Answering, adapters: LoadsAdapters, describe: Describe | None) -> None:
        """`describe` is None where nothing may be loaded."""
        self._answering, self._adapters, self._describe = answering, adapters, describe

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/load_lora_adapter", self.load, LoadAdapterRequest, Scope.OPERATOR),
            HttpRoute("POST", "/v1/unload_lora_adapter", self.unload, UnloadAdapterRequest, Scope.OPERATOR),
        ]

    async def load(self, http: HttpRequest) -> Response:
        """Load an adapter on every instance. Answers when each of them has it."""
        describe = self._allowed()
        body = await self._answering.read(http, LoadAdapterRequest)
        try:
            found = await asyncio.to_thread(describe, body.lora_name, body.lora_path)
        except ConfigError as error:
            raise RequestError(str(error), field="lora_path") from None
        await self._adapters.load(found.key, found.folder, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")

    async def unload(self, http: HttpRequest) -> Response:
        """Unload an adapter. Answers when the requests that had it are over and every instance has given it up."""
        self._allowed()
        body = await self._answering.read(http, UnloadAdapterRequest)
        await self._adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")

    def _allowed(self) -> Describe:
        if self._describe is None:
            raise RequestError(
                "adapters are those of the configuration: adapters.folders names no folder to load others from",
                status=403,
                code="adapters_are_fixed",
            )
        return self._describe

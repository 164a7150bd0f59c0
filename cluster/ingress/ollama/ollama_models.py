"""Ollama's routes for models: which there are, and what each can do. They come with the configuration, and stay."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import ClassVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.body_shape import Json
from cluster.ingress.generation.model_table import ModelTable
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.ollama.checkpoint_facts import CheckpointFacts
from cluster.ingress.ollama.ollama_bodies import said_at
from cluster.ingress.ollama.ollama_options import served_name, shown_names
from cluster.ingress.openai.model_routes import capabilities_of
from core.errors import RequestError

_API_VERSION = "0.12.11"
"""The release of Ollama whose API this is: clients choose by it what they ask for."""
_FOREVER = "2300-01-01T00:00:00+00:00"
FIXED = "models are those of the configuration: none of them is made, copied, deleted or uploaded here"
_OLLAMAS_NAMES = {"repetition_penalty": "repeat_penalty"}


class ModelName(Strict):
    neutral: ClassVar[NeutralFields] = dict.fromkeys(
        ("verbose", "system", "template", "options", "insecure", "username", "password"), (anything, "")
    )

    model: str = ""
    name: str = ""
    """The model, from older clients."""
    stream: bool = True

    @property
    def asked_model(self) -> str:
        return self.model or self.name

    @property
    def named(self) -> str:
        """The model. Raises RequestError."""
        if not self.asked_model:
            raise RequestError("'model' is required", field="model", code="missing_required_parameter")
        return self.asked_model


class OllamaModels:
    """What is asked of one model."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._facts = CheckpointFacts(answering.settings.tokenizer_folder)

    def routes(self) -> list[HttpRoute]:
        return [HttpRoute("POST", "/api/show", self.show, ModelName)]

    async def entries(self) -> list[Json]:
        """Return the model, once for each of its names, and its adapters."""
        return await asyncio.to_thread(self._entries)

    async def running(self) -> list[Json]:
        """Return the same while any instance can answer, and does not sleep."""
        if await self._answering.state() != "serving":
            return []
        most = self._answering.settings.max_context_tokens
        loaded = {"expires_at": _FOREVER, "context_length": most}
        return [{**entry, **loaded} for entry in await self.entries()]

    async def show(self, http: HttpRequest) -> Response:
        """Return what there is to know of a model."""
        body = await self._answering.read(http, ModelName)
        name = served_name(body.named, self._answering.settings)
        return JSONResponse(await asyncio.to_thread(self._shown, name))

    def _entries(self) -> list[Json]:
        settings, facts = self._answering.settings, self._facts
        return [
            {
                "name": shown,
                "model": shown,
                "modified_at": said_at(facts.modified_at),
                "size": facts.size,
                "digest": facts.digest(settings.adapters[name].key if name in settings.adapters else ""),
                "details": self._details(name),
            }
            for name, shown in shown_names(settings).items()
        ]

    def _details(self, name: str) -> Json:
        settings, facts = self._answering.settings, self._facts
        return {
            "parent_model": settings.model_name if name in settings.adapters else "",
            "format": facts.format,
            "family": facts.family,
            "families": [facts.family],
            "parameter_size": facts.parameter_size,
            "quantization_level": facts.level,
        }

    def _shown(self, name: str) -> Json:
        answering, settings, facts = self._answering, self._answering.settings, self._facts
        sampling = settings.default_sampling.items()
        lines = (f"{_OLLAMAS_NAMES.get(key, key):<30} {value}" for key, value in sampling)
        return {
            "modelfile": f"FROM {name}\n",
            "parameters": "\n".join(lines),
            "template": answering.tokenizer.template,
            "modified_at": said_at(facts.modified_at),
            "details": self._details(name),
            "model_info": {
                "general.architecture": facts.family,
                "general.parameter_count": facts.num_parameters,
                f"{facts.family}.context_length": settings.max_context_tokens,
                f"{facts.family}.embedding_length": settings.embedding_size,
            },
            "capabilities": capabilities_of(answering),
        }


class OllamaList:
    """What is asked of all models together."""

    def __init__(self, table: ModelTable, models: Sequence[OllamaModels]) -> None:
        self._table, self._models = table, dict(zip(table.rows, models, strict=True))

    def routes(self) -> list[HttpRoute]:
        fixed = [f"/api/{name}" for name in ("copy", "create", "push", "blobs/{digest}")]
        return [
            HttpRoute("GET", "/api/tags", self.tags),
            HttpRoute("GET", "/api/ps", self.running),
            HttpRoute("GET", "/api/version", self.version),
            *(HttpRoute("POST", path, self.refuse) for path in fixed),
            HttpRoute("HEAD", "/api/blobs/{digest}", self.has_blob),
        ]

    async def tags(self, http: HttpRequest) -> Response:
        """List the models, once for each of their names, and their adapters."""
        return await self._listed(each.entries() for each in self._seen(http))

    async def running(self, http: HttpRequest) -> Response:
        """List the same models, while any of their instances can answer."""
        return await self._listed(each.running() for each in self._seen(http))

    async def version(self, http: HttpRequest) -> Response:
        """Return the release of Ollama whose API this is."""
        return JSONResponse({"version": _API_VERSION})

    async def refuse(self, http: HttpRequest) -> Response:
        """Refuse to change which models there are."""
        raise RequestError(FIXED, status=403, code="models_are_fixed")

    async def has_blob(self, http: HttpRequest) -> Response:
        """Say that a file of a model was not uploaded."""
        raise RequestError("no file of a model is kept here", status=404)

    def _seen(self, http: HttpRequest) -> list[OllamaModels]:
        return [self._models[row] for row in self._table.seen_by(http.state.tenant)]

    async def _listed(self, entries: Iterable[Awaitable[list[Json]]]) -> Response:
        lists = await asyncio.gather(*entries)
        return JSONResponse({"models": [entry for each in lists for entry in each]})

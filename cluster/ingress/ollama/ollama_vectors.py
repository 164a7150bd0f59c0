"""Ollama's routes for vectors of texts."""

from typing import Annotated

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from cluster.ingress.bodies.body_model import Strict
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.text_vectors import TextVectors, unit
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.ollama.model_lifetime import ModelLifetime
from cluster.ingress.ollama.ollama_bodies import AskedTimes
from cluster.ingress.ollama.ollama_options import WHOLE, KeepAlive, OllamaOptions, served_name
from cluster.ingress.requests.generation_request import Terms
from core.clock import current_time


class VectorsBody(Strict):
    model: str
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    keep_alive: KeepAlive = None


class OllamaEmbed(VectorsBody):
    input: str | Annotated[list[str], Field(fail_fast=True)] = ""
    truncate: bool = True
    """Whether a text that is too long is cut; otherwise it is refused."""
    dimensions: Annotated[int, WHOLE, Field(ge=0)] = 0
    """The numbers of each vector that are wanted; 0: all."""


class OllamaEmbeddings(VectorsBody):
    prompt: str = ""


class OllamaVectors:
    def __init__(self, answering: Answering, lifetime: ModelLifetime) -> None:
        self._answering, self._texts, self._lifetime = answering, TextVectors(answering), lifetime

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/api/embed", self.embed, OllamaEmbed),
            HttpRoute("POST", "/api/embeddings", self.embeddings, OllamaEmbeddings),
        ]

    async def embed(self, http: HttpRequest) -> Response:
        """Return each text's vector, of length one."""
        body = await self._answering.read(http, OllamaEmbed)
        self._lifetime.keep(http, body.keep_alive)
        model = served_name(body.model, self._answering.settings)
        size = body.dimensions or None
        self._texts.check(model, size)
        if not body.input:
            return JSONResponse({"model": body.model, "embeddings": []})
        prompts = await self._texts.prompts(
            http, body.input, "input", truncation=-1 if body.truncate else None
        )
        times = AskedTimes(http.state.arrival_at, current_time())
        vectors = await self._answering.vectors(http, Terms(model), prompts, "input")
        return JSONResponse(
            {
                "model": body.model,
                "embeddings": [unit(vector[:size]).tolist() for vector in vectors],
                **times.whole(),
                "prompt_eval_count": sum(map(len, prompts)),
            }
        )

    async def embeddings(self, http: HttpRequest) -> Response:
        """Return one text's vector, as the model makes it."""
        body = await self._answering.read(http, OllamaEmbeddings)
        self._lifetime.keep(http, body.keep_alive)
        model = served_name(body.model, self._answering.settings)
        self._texts.check(model)
        if not body.prompt:
            return JSONResponse({"embedding": []})
        prompts = await self._texts.prompts(http, body.prompt, "prompt", truncation=-1)
        (vector,) = await self._answering.vectors(http, Terms(model), prompts, "prompt")
        return JSONResponse({"embedding": self._texts.finished(vector).tolist()})

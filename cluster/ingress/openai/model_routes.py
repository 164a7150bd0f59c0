"""The list of models, as the clients of OpenAI, vLLM and Anthropic read it."""

import asyncio
import time
from datetime import UTC, datetime

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.body_shape import Json
from cluster.ingress.generation.model_table import ModelTable
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.openai.fill_in_middle import middle_marks


class ModelRoutes:
    def __init__(self, table: ModelTable) -> None:
        self._table = table
        self._started = int(time.time())

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("GET", "/v1/models", self.models),
            HttpRoute("GET", "/v1/models/{name:path}", self.model),
        ]

    async def models(self, http: HttpRequest) -> Response:
        rows = self._table.seen_by(http.state.tenant)
        states = await asyncio.gather(*(row.state() for row in rows))
        entries = [
            self._entry(name, row, state)
            for row, state in zip(rows, states, strict=True)
            for name in row.settings.names
        ]
        ids = [entry["id"] for entry in entries] or [None]
        page = {"first_id": ids[0], "last_id": ids[-1], "has_more": False}
        return JSONResponse({"object": "list", "data": entries, **page})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        row = self._table.find(name, http.state.tenant)
        return JSONResponse(self._entry(name, row, await row.state()))

    def _entry(self, name: str, row: Answering, state: str) -> Json:
        settings = row.settings
        adapter = settings.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "root": settings.model_name if adapter is None else adapter.folder,
            "parent": None if adapter is None else settings.model_name,
            "max_model_len": settings.max_context_tokens,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._started, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": settings.max_context_tokens,
            "max_tokens": settings.max_context_tokens,
            "baton": {"state": state, "capabilities": capabilities_of(row)},
        }


def capabilities_of(row: Answering) -> list[str]:
    """Return what a model can do, in Ollama's words."""
    settings, formats, pooling = row.settings, row.chat_format.formats, row.settings.pooling
    has = {
        "completion": settings.generates,
        "tools": settings.generates and formats.tools != "none",
        "thinking": settings.generates and formats.reasoning != "none",
        "insert": settings.generates and middle_marks(row.tokenizer) is not None,
        "vision": settings.images is not None,
        "embedding": pooling is not None and not pooling.scores,
    }
    return [name for name, holds in has.items() if holds]

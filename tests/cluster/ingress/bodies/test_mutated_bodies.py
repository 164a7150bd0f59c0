"""No body gives a 500, whichever of its places holds whatever: each is answered, or refused with a reason."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from cluster.ingress.http_app import create_app
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.access import Access
from core.config.adapter_config import ServedAdapter
from core.errors import ConfigError, RequestError
from models.pooling.pooling import Pooling
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import OPEN, SETTINGS, message_of
from tests.cluster.ingress.api.mutations import BODIES, mutated, valid_bodies
from tests.cluster.ingress.api.template_fakes import HERMES, TemplateTokenizer
from tests.cluster.ingress.openai.test_beams import Searcher
from tests.cluster.ingress.openai.test_embeddings import VectorGenerator
from tests.cluster.ingress.openai.test_fill_in_middle import FAMILIES, Beginning

_PARTS = 5
"""There are 20,000 mutated bodies. Each day has a part of every route's."""
_LACKS = (
    "reads no images",
    "cannot be constrained",
    "no adapter",
    "no file",
    "no such",
    "no tokens for text",
)
"""What the model of these tests has not, as refusals of valid bodies say."""
_EMBEDS = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/api/embed", "/api/embeddings")
_ALONE = ("/v1/messages", "/api/")
"""The beginnings of routes whose errors name no field beside the message."""


def _adapter(name: str, path: str) -> ServedAdapter:
    raise ConfigError(f"{path}: no adapter lies there")


def client(route: str) -> httpx.AsyncClient:
    settings = replace(SETTINGS, max_context_tokens=4000, vocab_size=400, describe_adapter=_adapter)
    generator = VectorGenerator() if route in _EMBEDS else Searcher()
    generator.adapters.refusal = RequestError("no adapter is called that", field="lora_name", status=404)
    if route in _EMBEDS:
        settings = replace(settings, pooling=Pooling(kind="last"), embedding_size=4)
    settings = replace(settings, file_store_bytes=1 << 20)
    tokenizer = Beginning(FAMILIES["Qwen2.5-Coder"][0]) if route == "/infill" else TemplateTokenizer(HERMES)
    app = create_app(generator, tokenizer, settings, Access(OPEN), make_observers(NAME))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api")


async def all_are_answered(route: str, bodies: list[bytes]) -> None:
    async with client(route) as http:
        for body in bodies:
            answer = await http.post(route, content=body, headers={"content-type": "application/json"})
            assert answer.status_code < 500, (body, answer.text)
            if answer.status_code >= 400:
                error: Any = answer.json()["error"]
                said = message_of(error)
                assert said, body
                assert "error:" not in said, (body, error)
                assert route.startswith(_ALONE) or error["param"] or body[:1] != b"{", (body, error)
            elif answer.headers["content-type"].startswith(("text/event-stream", "application/x-ndjson")):
                assert '"internal"' not in answer.text, (body, answer.text)


@pytest.mark.parametrize("route", BODIES)
async def test_a_valid_body_is_understood(route: str) -> None:
    async with client(route) as http:
        for body in valid_bodies(route):
            answer = await http.post(route, json=body)
            assert answer.status_code == 200 or any(each in answer.text for each in _LACKS), answer.text


@pytest.mark.turns(_PARTS)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("route", BODIES)
async def test_no_mutated_body_fails(route: str, part: int) -> None:
    bodies = [each for body in valid_bodies(route) for each in mutated(body)]
    await all_are_answered(route, bodies[part::_PARTS])

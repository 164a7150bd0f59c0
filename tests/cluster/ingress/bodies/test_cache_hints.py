"""What clients of each API may say of the time after a request, and what the cluster makes of it."""

from collections.abc import AsyncIterator
from math import inf
from typing import Any

import anthropic
import httpx2
import pytest

from core.types import CacheHints
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, COMPLETIONS, OK, Api

MESSAGES = "/v1/messages"
MESSAGE = {"model": NAME, "max_tokens": 30, "messages": [{"role": "user", "content": "x"}]}
RESPONSE = {"model": NAME, "input": "x"}


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = Api(FakeGenerator())
    yield api
    await api.http.aclose()


def hints(api: Api) -> CacheHints:
    return api.generator.requests[-1].hints


@pytest.mark.parametrize(
    ("path", "body"), [(CHATS, CHAT), (COMPLETIONS, OK), (MESSAGES, MESSAGE), ("/v1/responses", RESPONSE)]
)
async def test_every_api_takes_the_same_hints(api: Api, path: str, body: dict[str, Any]) -> None:
    given = {"session": "s", "ttl_s": 90.5, "prefetch": 12}
    assert (await api.post(path, {**body, "cache_hints": given})).status_code == 200
    assert hints(api) == CacheHints(session="s", ttl_s=90.5, prefetch_s=12.0)
    assert api.generator.requests[-1].retain
    answer = await api.post(path, {**body, "cache_hints": {"sesion": "s"}})
    assert "cache_hints.sesion" in answer.headers["x-baton-warning"]


@pytest.mark.parametrize(
    ("given", "means", "stays"),
    [
        ({}, CacheHints(), True),
        ({"session": "s"}, CacheHints(session="s"), True),
        ({"pin": True}, CacheHints(ttl_s=inf), True),
        ({"session": "s", "prefetch": False}, CacheHints(session="s", prefetch_s=inf), True),
        ({"session": "s", "prefetch": 0}, CacheHints(session="s", prefetch_s=0.0), True),
        ({"session": "s", "release": True}, CacheHints(session="s"), False),
    ],
)
async def test_hints_mean(api: Api, given: dict[str, Any], means: CacheHints, stays: bool) -> None:
    await api.post(CHATS, {**CHAT, "cache_hints": given})
    assert (hints(api), api.generator.requests[-1].retain) == (means, stays)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 86401}, "ttl_s"),
        ({"session": ""}, "session"),
        ({"pin": True, "ttl_s": 5}, "does not go with ttl_s"),
        ({"session": "s", "release": True, "pin": True}, "does not go with them"),
        ({"release": True}, "cache_hints.release needs a session"),
        ({"prefetch": 5}, "cache_hints.prefetch needs a session"),
    ],
)
async def test_hints_that_mean_nothing_are_refused(api: Api, given: dict[str, Any], says: str) -> None:
    answer = await api.post(CHATS, {**CHAT, "cache_hints": given})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert not api.generator.requests


async def test_openais_own_fields_are_hints(api: Api) -> None:
    client = api.openai
    messages: Any = [{"role": "user", "content": "x"}]
    await client.chat.completions.create(
        model=NAME, messages=messages, prompt_cache_key="k", prompt_cache_retention="24h"
    )
    assert hints(api) == CacheHints(session="k", ttl_s=86400.0)
    await client.responses.create(model=NAME, input="x", prompt_cache_key="k")
    assert hints(api) == CacheHints(session="k")
    await client.chat.completions.create(
        model=NAME, messages=messages, prompt_cache_key="k", extra_body={"cache_hints": {"session": "s"}}
    )
    assert hints(api).session == "s"


async def test_anthropics_cache_control_is_a_time(api: Api) -> None:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app), base_url="http://api")
    client = anthropic.AsyncAnthropic(base_url="http://api", api_key="k", http_client=http, max_retries=0)
    text: Any = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    hour: Any = {"type": "text", "text": "y", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages: Any = [{"role": "user", "content": [text]}]
    await client.messages.create(model=NAME, max_tokens=20, messages=messages)
    assert hints(api) == CacheHints(ttl_s=300.0)
    await client.messages.create(model=NAME, max_tokens=20, messages=messages, system=[hour])
    assert hints(api) == CacheHints(ttl_s=3600.0)
    session = {"cache_hints": {"session": "s"}}
    await client.messages.create(model=NAME, max_tokens=20, messages=messages, extra_body=session)
    assert hints(api) == CacheHints(session="s", ttl_s=300.0)
    last = {"cache_hints": {"session": "s", "release": True}}
    await client.messages.create(model=NAME, max_tokens=20, messages=messages, extra_body=last)
    assert (hints(api).ttl_s, api.generator.requests[-1].retain) == (0.0, False)


@pytest.mark.parametrize(
    ("control", "says"),
    [
        ({"type": "forever"}, "cache_control.type must be 'ephemeral', not 'forever'"),
        ({"type": "ephemeral", "ttl": "2h"}, "cache_control.ttl must be '5m' or '1h', not '2h'"),
        ({"type": "ephemeral", "ttl": []}, "cache_control.ttl must be '5m' or '1h', not a list"),
        ({}, "cache_control.type is required"),
    ],
)
async def test_another_cache_control_is_refused(api: Api, control: dict[str, Any], says: str) -> None:
    answer = await api.post(MESSAGES, {**MESSAGE, "cache_control": control})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, says)


async def test_a_chat_has_it_at_its_messages_and_tools(api: Api) -> None:
    """LiteLLM and OpenRouter send it there."""
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    part: Any = {"type": "text", "text": "x", **hour}
    for message in ({"role": "user", "content": [part]}, {"role": "user", "content": "x", **hour}):
        assert (await api.post(CHATS, {"model": NAME, "messages": [message]})).status_code == 200
        assert hints(api) == CacheHints(ttl_s=3600.0)
    tool: Any = {"type": "function", "function": {"name": "f"}, **hour}
    answer = await api.post(CHATS, {**CHAT, "tools": [tool], "tool_choice": "none"})
    assert (answer.status_code, hints(api)) == (200, CacheHints(ttl_s=3600.0))


async def test_sessions_are_spoken_of_between_requests(api: Api) -> None:
    answer = await api.post("/v1/cache_hints", {"session": "s", "action": "release"})
    assert answer.json() == {"session": "s", "action": "release", "instances": ["one"]}
    await api.post("/v1/cache_hints", {"session": "t", "action": "prefetch"})
    assert api.generator.hinted == [("", "s", True), ("", "t", False)]
    for body in ({"session": "s"}, {"session": "s", "action": "forget"}, {"action": "release"}):
        assert (await api.post("/v1/cache_hints", body)).status_code == 400

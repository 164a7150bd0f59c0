"""A stream that has nothing to say yet: comments come meanwhile, and the SDKs pass over them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import openai
import pytest

from cluster.ingress.generation.http_responses import EventResponse
from core.errors import Overloaded
from core.types import Request, TokenOut
from tests.cluster.ingress.anthropic.test_messages import client
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, COMPLETIONS, OK, SETTINGS, Api
from tests.cluster.ingress.http.test_disconnect import http_post, serving
from tests.patience import PATIENCE_S, until

OFTEN = replace(SETTINGS, keep_alive_s=0.02)
PATIENT = replace(SETTINGS, keep_alive_s=PATIENCE_S)
COMMENT = b": keep-alive\n\n"
MESSAGES: list[Any] = CHAT["messages"]


class SlowRefusal(FakeGenerator):
    """Refuses a request once it may go on."""

    async def generate(self, request: Request, shared: object = None) -> AsyncIterator[TokenOut]:
        self.requests.append(request)
        await self.go_on.wait()
        raise Overloaded("the fleet is full", retry_after_s=1)
        yield


async def go_on_soon(generator: FakeGenerator) -> None:
    await until(lambda: bool(generator.requests))
    await asyncio.sleep(0.1)
    generator.go_on.set()


@contextlib.asynccontextmanager
async def slow_to_begin(generator: FakeGenerator) -> AsyncIterator[Api]:
    soon = asyncio.create_task(go_on_soon(generator))
    yield Api(generator, OFTEN)
    await soon


def stalling(at: int) -> FakeGenerator:
    generator = FakeGenerator("hello world")
    generator.stall_at = at
    return generator


@pytest.mark.parametrize("stall_at", [0, 4])
async def test_comments_come_while_nothing_else_does(stall_at: int) -> None:
    generator = stalling(stall_at)
    async with serving(generator, OFTEN) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_post(COMPLETIONS, json.dumps({**OK, "stream": True, "max_tokens": 11}).encode()))
        for _ in range(3):
            assert await asyncio.wait_for(reader.readuntil(COMMENT), PATIENCE_S)
        generator.go_on.set()
        assert await asyncio.wait_for(reader.readuntil(b"[DONE]"), PATIENCE_S)
        writer.close()
        await writer.wait_closed()
    assert generator.finished


async def test_a_stream_that_says_enough_has_none() -> None:
    api = Api(FakeGenerator("hello world"), PATIENT)
    answer = await api.post(CHATS, {**CHAT, "stream": True})
    assert answer.status_code == 200
    assert COMMENT not in answer.content


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_openais_sdk_passes_over_comments(path: str) -> None:
    async with slow_to_begin(stalling(0)) as api:
        if path == CHATS:
            chunks = [c async for c in await api.openai.chat.completions.create(**CHAT, stream=True)]
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hello world"
        else:
            pieces = [c async for c in await api.openai.completions.create(**OK, stream=True)]
            assert "".join(c.choices[0].text for c in pieces) == "hello world"


async def test_responses_and_messages_pass_over_them_too() -> None:
    async with (
        slow_to_begin(stalling(0)) as api,
        api.openai.responses.stream(model="fake", input="x") as events,
    ):
        assert (await events.get_final_response()).output_text == "hello world"
    asked: Any = {"model": "fake", "max_tokens": 50, "messages": MESSAGES}
    async with slow_to_begin(stalling(0)) as api, client(api).messages.stream(**asked) as messages:
        assert await messages.get_final_text() == "hello world"


async def test_what_fails_behind_comments_is_an_event() -> None:
    async with slow_to_begin(SlowRefusal()) as api:
        with pytest.raises(openai.APIError, match="the fleet is full"):
            _ = [c async for c in await api.openai.chat.completions.create(**CHAT, stream=True)]
    async with slow_to_begin(SlowRefusal()) as api:
        with pytest.raises(anthropic.APIError, match="the fleet is full"):
            async with client(api).messages.stream(
                model="fake", max_tokens=50, messages=MESSAGES
            ) as messages:
                await messages.get_final_text()
    async with slow_to_begin(SlowRefusal()) as api:
        created = await api.openai.responses.create(model="fake", input="x", stream=True)
        kinds = [(event.type, event.sequence_number) async for event in created]
    assert kinds == [("response.created", 0), ("response.in_progress", 1), ("response.failed", 2)]


@pytest.mark.parametrize("settings", [PATIENT, replace(SETTINGS, keep_alive_s=0.0)])
async def test_what_fails_before_has_a_status_of_its_own(settings: Any) -> None:
    generator = SlowRefusal()
    soon = asyncio.create_task(go_on_soon(generator))
    answer = await Api(generator, settings).post(CHATS, {**CHAT, "stream": True})
    await soon
    assert answer.status_code == 429
    assert answer.json()["error"]["message"] == "the fleet is full"


async def test_a_client_that_goes_away_after_a_comment_ends_the_generation() -> None:
    generator = stalling(0)
    async with serving(generator, OFTEN) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_post(COMPLETIONS, json.dumps({**OK, "stream": True}).encode()))
        await asyncio.wait_for(reader.readuntil(COMMENT), PATIENCE_S)
        writer.close()
        await writer.wait_closed()
        await until(lambda: len(generator.closed) == 1)


async def test_comments_end_with_the_stream() -> None:
    sent: list[bytes] = []

    async def source() -> AsyncIterator[str]:
        yield "data: one\n\n"
        yield "data: two\n\n"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    events = source()
    response = EventResponse(asyncio.ensure_future(anext(events)), events, 0.01)  # type: ignore[arg-type]
    await response.stream_response(send)
    num_sent = len(sent)
    await asyncio.sleep(0.05)
    assert sent[-1] == b""
    assert len(sent) == num_sent
    assert [task for task in asyncio.all_tasks() if "_beat" in repr(task)] == []

"""The ids of a stream's events: what comes behind any of them, with what came before it, is the stream."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import HERMES, TemplateTokenizer, TokenGenerator
from tests.cluster.ingress.parsers.recorded_texts import RECORDED, WEATHER

ASKED: dict[str, Any] = {"model": NAME, "stream": True, "temperature": 1.0}
MESSAGES = [{"role": "user", "content": "Weather in Zürich?"}]
WHOLE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOL = {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}
CHATS_TOOLS = [{"type": "function", "function": TOOL}, {"type": "function", "function": {"name": "get_time"}}]
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "tools": CHATS_TOOLS, "logprobs": True, **WHOLE}),
    "chats": ("/v1/chat/completions", {"messages": MESSAGES, "tools": CHATS_TOOLS, "n": 3}),
    "completion": ("/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, "return_token_ids": True}),
    "completions": ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "logprobs": 1}),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 3000, "tools": [{"name": "get_weather", "input_schema": WEATHER}]},
    ),
    "responses": (
        "/v1/responses",
        {"input": "Weather?", "tools": [{"type": "function", **TOOL}], "include": ["message.output_text.logprobs"]},
    ),
}  # fmt: skip
TEXTS = (RECORDED["qwen2.5"].text, "Ünïcödé 한글 " * 3, "<think>\nWell.\n</think>\nSo.")


def api_saying(text: str) -> Api:
    tokenizer = TemplateTokenizer(HERMES, (), "")
    own = replace(SETTINGS, max_context_tokens=4000, vocab_size=400, resume_s=30.0)
    return Api(TokenGenerator(text, tokenizer), own, tokenizer=tokenizer)


async def events_of(api: Api, path: str, body: dict[str, Any], after: str = "") -> list[str]:
    response = await api.post(path, ASKED | body, **({"last-event-id": after} if after else {}))
    assert response.status_code == 200, response.text
    return [event for event in response.text.split("\n\n") if event and not event.startswith(":")]


@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), text=st.sampled_from(TEXTS))
def test_what_came_before_any_event_and_what_comes_behind_it_is_the_stream(
    door: str, data: st.DataObject, text: str
) -> None:
    path, body = DOORS[door]
    api = api_saying(text)

    async def run() -> None:
        whole = await events_of(api, path, body)
        ids = [event.partition("\n")[0] for event in whole]
        assert len(set(ids)) == len(whole)
        cut = data.draw(st.integers(0, len(whole) - 1))
        last = ids[cut].removeprefix("id: ")
        other = api_saying(text)
        rest = await events_of(other, path, body, last)
        if body.get("n", 1) == 1:
            assert rest == whole[cut + 1 :]
        assert sorted(map(payload, whole[: cut + 1] + rest)) == sorted(map(payload, whole))

    asyncio.run(run())


def payload(event: str) -> str:
    """What an event says, without its id: that names how far each choice had come, in whatever order."""
    return event.partition("\n")[2]


async def test_equal_requests_have_answers_of_their_own() -> None:
    api = api_saying("So.")
    first, second = [await events_of(api, *DOORS["chat"]) for _ in range(2)]
    assert first[0].partition(":")[0] == "id"
    assert first[0].partition("-")[0] != second[0].partition("-")[0]
    seeds = [request.sampling.seed for request in api.generator.requests]
    assert len({*seeds}) == 2


async def test_an_answer_in_lines_of_json_has_no_ids() -> None:
    api = api_saying("So.")
    response = await api.post("/api/chat", {"model": NAME, "messages": MESSAGES})
    assert all(json.loads(line) for line in response.text.strip().split("\n"))

"""Each answer is what the openai and anthropic packages' types say, field by field. Their clients themselves check nothing."""

import json
from typing import Any, get_args

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHATS, COMPLETIONS, OK, Api
from tests.cluster.ingress.api.template_fakes import served
from tests.cluster.ingress.parsers.recorded_texts import RECORDED, WEATHER

THINKS = ("{{ tools }} <tool_call></tool_call> <think></think>", ["<think>", "</think>"], "<think>\n")
TEXT = "Okay.\n</think>\n\n" + RECORDED["qwen2.5"].text
FUNCTIONS = [{"name": "get_weather", "parameters": WEATHER}, {"name": "get_time", "strict": None}]
ASK = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {
        "messages": ASK,
        "tools": [{"type": "function", "function": function} for function in FUNCTIONS],
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/v1/responses": {
        "input": ASK,
        "instructions": "Be brief.",
        "tools": [{"type": "function", **function} for function in FUNCTIONS],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]},
        "include": ["message.output_text.logprobs"],
        "reasoning": {"effort": "medium"},
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "messages": ASK,
        "max_tokens": 500,
        "thinking": {"type": "adaptive"},
        "tools": [{"name": function["name"], "input_schema": {"type": "object"}} for function in FUNCTIONS],
    },
}  # fmt: skip
WHOLE: dict[str, type[BaseModel]] = {
    CHATS: ChatCompletion,
    "/v1/responses": Response,
    "/v1/messages": Message,
}
EVENTS: dict[str, Any] = {
    CHATS: ChatCompletionChunk,
    "/v1/responses": ResponseStreamEvent,
    "/v1/messages": RawMessageStreamEvent,
}


def kinds(events: Any) -> dict[str, Any]:
    """By the value of `type`, the class of an event."""
    union, *_ = get_args(events)
    return {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(union)}


def said(stream: str) -> list[Any]:
    lines = (line for line in stream.splitlines() if line.startswith("data: {"))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_is_what_its_type_says(path: str) -> None:
    answer = await served(TEXT, *THINKS).post(path, {"model": NAME, **BODIES[path]})
    assert answer.status_code == 200, answer.text
    TypeAdapter(WHOLE[path]).validate_json(answer.content, strict=True)


@pytest.mark.parametrize("path", BODIES)
async def test_each_event_is_what_its_type_says(path: str) -> None:
    options = {"stream_options": {"include_usage": True}} if path == CHATS else {}
    answer = await served(TEXT, *THINKS).post(
        path, {"model": NAME, **BODIES[path], **options, "stream": True}
    )
    events = said(answer.text)
    assert len(events) > 10
    for event in events:
        one = EVENTS[path] if path == CHATS else kinds(EVENTS[path])[event["type"]]
        TypeAdapter(one).validate_json(json.dumps(event), strict=True)


async def test_completions_and_models_are_what_their_types_say() -> None:
    api = Api(FakeGenerator("hello"))
    answer = await api.post(COMPLETIONS, {**OK, "logprobs": 1, "n": 2})
    TypeAdapter(Completion).validate_json(answer.content, strict=True)
    TypeAdapter(Model).validate_json((await api.http.get(f"/v1/models/{NAME}")).content, strict=True)

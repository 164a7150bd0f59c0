"""What becomes of null, unknown and unsupported fields, on every route and at every depth."""

import logging
from dataclasses import replace
from typing import Any, Literal

import pytest

from cluster.ingress.bodies.body_model import validate
from cluster.ingress.openai.request_bodies import ChatRequest
from core.errors import RequestError
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, COMPLETIONS, OK, SETTINGS, Api
from tests.cluster.ingress.api.mutations import BODIES, valid_bodies
from tests.cluster.ingress.api.template_fakes import last_rendered, served
from tests.cluster.ingress.bodies.test_mutated_bodies import client

WARNING = "x-baton-warning"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def with_policy(policy: Literal["reject", "warn", "ignore"]) -> Api:
    return Api(FakeGenerator(), replace(SETTINGS, unknown_fields=policy))


@pytest.mark.parametrize("route", BODIES)
async def test_null_is_absence_for_every_optional_field_of_every_body(route: str) -> None:
    async with client(route) as http:
        described = (await http.get("/openapi.json")).json()
        schema = described["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
        body = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        absent: dict[str, Any] = dict.fromkeys(set(body["properties"]) - set(body.get("required", ())))
        for valid in valid_bodies(route):
            as_it_is = await http.post(route, json=valid)
            answer = await http.post(route, json={**absent, **valid})
            assert answer.status_code == as_it_is.status_code, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, {"encoding_format": None, "kv_transfer_params": None, "stream_options": None}),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": None}]}]}),
        (CHATS, {"messages": [{"role": "user", "content": "x", "name": None, "tool_calls": None, "refusal": None}]}),
        (CHATS, {"tools": [{"type": "function", "function": {"name": "f", "parameters": None}}], "tool_choice": "none"}),
        (CHATS, {"response_format": None, "structured_outputs": None, "cache_hints": {"session": None, "pin": None}}),
        ("/v1/embeddings", {"input": "x", "encoding_format": None, "add_special_tokens": None, "dimensions": None}),
        (RESPONSES, {"input": [{"role": "user", "content": "x", "id": None, "status": None, "other": None}]}),
        (RESPONSES, {"input": "x", "reasoning": {"effort": None}, "text": {"format": None, "verbosity": None}}),
        (MESSAGES, {"max_tokens": 3, "thinking": None, "tool_choice": None, "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": None, "is_error": None}]}]}),
    ],
)  # fmt: skip
async def test_null_is_absence_inside_of_a_body_and_for_unknown_fields(
    path: str, body: dict[str, Any]
) -> None:
    async with client(path) as http:
        base = CHAT if path in (CHATS, MESSAGES) else {"model": NAME}
        answer = await http.post(path, json={**base, **body})
        assert answer.status_code == 200, answer.text
        assert WARNING not in answer.headers


def test_a_field_that_must_be_there_is_not_null() -> None:
    with pytest.raises(RequestError) as refused:
        validate(ChatRequest, {**CHAT, "messages": None})
    assert refused.value.message == "messages must be a list, not null"


async def test_null_keywords_of_a_schema_are_absent_and_null_values_are_not() -> None:
    given = {"type": "object", "required": None, "title": None, "properties": {
        "a": {"type": "string", "enum": None, "minLength": None},
        "b": {"anyOf": [{"type": "object", "properties": None}, {"const": None}], "default": None},
        "c": None,
    }}  # fmt: skip
    meant = {"type": "object", "properties": {
        "a": {"type": "string"}, "b": {"anyOf": [{"type": "object"}, {"const": None}], "default": None}, "c": {},
    }}  # fmt: skip
    api = served("x")
    shapes: dict[str, Any] = {
        CHATS: {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": given}}]},
        MESSAGES: {**CHAT, "max_tokens": 3, "tools": [{"name": "f", "input_schema": given}]},
        RESPONSES: {"model": NAME, "input": "x", "tools": [{"type": "function", "name": "f", "parameters": given}]},
    }  # fmt: skip
    for path, body in shapes.items():
        assert (await api.post(path, body)).status_code == 200
        assert last_rendered(api)["tools"][0]["function"]["parameters"] == meant, path
    everywhere = {"type": "object", "properties": None, "required": None}
    body = {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "parameters": everywhere}}]}
    assert (await api.post(CHATS, body)).status_code == 200
    assert last_rendered(api)["tools"][0]["function"]["parameters"] == {"type": "object"}


async def test_a_byte_order_mark_before_the_json_is_skipped() -> None:
    answer = await Api(FakeGenerator()).post(COMPLETIONS, b'\xef\xbb\xbf{"model": "fake", "prompt": "x"}')
    assert answer.status_code == 200, answer.text


UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {**OK, "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "x", "vendor": 1}]}, "messages[0].vendor"),
    (CHATS, {**CHAT, "tools": [{"type": "function", "function": {"name": "f", "hint": 1}}], "tool_choice": "none"},
     "tools[0].function.hint"),
    (CHATS, {**CHAT, "stream_options": {"more": 1}, "stream": True}, "stream_options.more"),
    (RESPONSES, {"model": NAME, "input": [{"role": "user", "content": "x", "vendor": 1}]}, "input[0].vendor"),
    (MESSAGES, {**CHAT, "max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "v": 1}]}]},
     "messages[0].content[0].v"),
    ("/v1/cache_hints", {"session": "s", "action": "release", "why": "x"}, "why"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "place"), UNKNOWN)
async def test_an_unknown_field_is_left_out_and_named_by_its_place(
    path: str, body: dict[str, Any], place: str
) -> None:
    answer = await with_policy("warn").post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[WARNING] == f"unknown and left out: {place}"
    silent = await with_policy("ignore").post(path, body)
    assert (silent.status_code, silent.headers.get(WARNING)) == (200, None)
    refused = await with_policy("reject").post(path, body)
    assert refused.status_code == 400
    assert f"unknown parameter '{place}'" in refused.text


async def test_a_field_that_is_left_out_is_given_to_no_template() -> None:
    api = served("x")
    tool = {"type": "function", "other": 1, "function": {"name": "f", "description": None, "more": 2}}
    assert (await api.post(CHATS, {**CHAT, "tools": [tool]})).status_code == 200
    assert last_rendered(api)["tools"] == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("policy", ["warn", "ignore", "reject"])
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHATS, {"audio": {"voice": "x"}}, "only text is generated"),
        (CHATS, {"logits_processors": ["x"]}, "not run"),
        (CHATS, {"best_of": 2}, "/v1/completions"),
        (CHATS, {"mirostat": 2}, "does not exist here"),
        (MESSAGES, {"max_tokens": 3, "cache_salt": "secret"}, "/v1/chat/completions"),
        (MESSAGES, {"max_tokens": 3, "seed": 5}, "/v1/chat/completions"),
        (RESPONSES, {"input": "x", "max_tokens": 5}, "max_output_tokens"),
        (RESPONSES, {"input": "x", "logit_bias": {"5": 1}}, "/v1/chat/completions"),
        ("/v1/embeddings", {"input": "x", "stream": True}, "what generates"),
    ],
)
async def test_a_known_field_that_would_change_the_answer_is_always_refused(
    policy: Literal["reject", "warn", "ignore"], path: str, body: dict[str, Any], says: str
) -> None:
    base = CHAT if path in (CHATS, MESSAGES) else {"model": NAME}
    refused = await with_policy(policy).post(path, {**base, **body})
    assert refused.status_code == 400
    assert says in refused.text


@pytest.mark.parametrize("policy", ["warn", "reject"])
@pytest.mark.parametrize(
    "body",
    [
        {"best_of": 1, "length_penalty": 1.0, "early_stopping": False, "typical_p": 1.0, "logits_processors": []},
        {"user": "u", "metadata": {"a": "b"}, "functions": [], "suffix": "", "modalities": ["text"], "store": False},
        {"presence_penalty": 0, "repeat_penalty": 1.0, "mm_processor_kwargs": {}, "verbosity": "medium"},
    ],
)  # fmt: skip
async def test_neutral_values_change_nothing(policy: Literal["reject", "warn"], body: dict[str, Any]) -> None:
    answer = await with_policy(policy).post(CHATS, {**CHAT, **body})
    assert (answer.status_code, answer.headers.get(WARNING)) == (200, None), answer.text


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHATS, {"store": True}, "store: this server keeps no chats"),
        (CHATS, {"verbosity": "low"}, "verbosity: the served models have no such setting"),
        (RESPONSES, {"input": "x", "text": {"verbosity": "high"}}, "text.verbosity"),
    ],
)
async def test_what_no_model_can_do_is_said_in_a_header(path: str, body: dict[str, Any], says: str) -> None:
    base = CHAT if path == CHATS else {"model": NAME}
    answer = await with_policy("reject").post(path, {**base, **body})
    assert answer.status_code == 200, answer.text
    assert says in answer.headers[WARNING]


async def test_a_name_that_a_client_made_up_harms_no_header() -> None:
    body = {**OK, "bad\r\nx-evil: 1\x7f é": 1, "y" * 5000: 1}
    answer = await with_policy("warn").post(COMPLETIONS, body)
    assert answer.status_code == 200
    assert "x-evil" not in answer.headers
    assert answer.headers[WARNING].isascii()
    assert answer.headers[WARNING].isprintable()
    assert len(answer.headers[WARNING]) < 1100


async def test_the_log_has_each_note_once(caplog: pytest.LogCaptureFixture) -> None:
    api = with_policy("warn")
    with caplog.at_level(logging.WARNING, "cluster.ingress.generation.answer_notes"):
        for _ in range(5):
            await api.post(COMPLETIONS, {**OK, "vendor": 1})
        assert len(caplog.records) == 1
        for number in range(500):
            await api.post(COMPLETIONS, {**OK, f"made_up_{number}": 1})
        assert len(caplog.records) <= 64


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "x", "stream_options": {"include_usage": True}, "n": 1, "skip_special_tokens": True}),
        (MESSAGES, {**CHAT, "max_tokens": 3, "priority": 0, "cache_salt": "", "n": 1, "add_generation_prompt": True}),
    ],
)  # fmt: skip
async def test_defaults_of_another_routes_fields_are_neutral(path: str, body: dict[str, Any]) -> None:
    answer = await with_policy("reject").post(path, {"model": NAME, **body})
    assert (answer.status_code, answer.headers.get(WARNING)) == (200, None), answer.text


async def test_a_stream_has_the_header_too() -> None:
    answer = await with_policy("warn").post(CHATS, {**CHAT, "stream": True, "vendor": 1})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers[WARNING] == "unknown and left out: vendor"

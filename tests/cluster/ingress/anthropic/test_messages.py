"""/v1/messages through the anthropic client, over a generator that writes what a model of the family would."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_type_hints

import anthropic
import httpx2
import pytest
from anthropic.types import ModelInfo, TextBlock, ThinkingBlock, ToolUseBlock, message_count_tokens_params
from anthropic.types.message_create_params import MessageCreateParamsBase
from pydantic import SecretStr

from cluster.ingress.anthropic.anthropic_requests import MESSAGES_NEUTRAL, CountTokensRequest, MessagesRequest
from cluster.ingress.tenants.access import Rules, TenantRules
from core.errors import Overloaded
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import HERMES, TemplateTokenizer, last_rendered, served
from tests.cluster.ingress.parsers.recorded_texts import RECORDED, WEATHER

PATH = "/v1/messages"
ASK: list[Any] = [{"role": "user", "content": "Weather in Zürich?"}]
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER},
    {"name": "get_time", "input_schema": {"type": "object"}},
]
CALLS = [("get_weather", {"city": "Zürich", "days": 2}), ("get_time", {})]
THINKS = "enable_thinking <think></think>"
MARKS = ["<think>", "</think>"]


def client(api: Api, key: str = "k") -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app), base_url="http://api")
    return anthropic.AsyncAnthropic(base_url="http://api", api_key=key, http_client=http, max_retries=0)


async def answer(api: Api, stream: bool = False, **options: Any) -> Any:
    options = {"model": NAME, "max_tokens": 500, "messages": ASK, **options}
    if not stream:
        return await client(api).messages.create(**options)
    async with client(api).messages.stream(**options) as events:
        return await events.get_final_message()


def called(blocks: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in blocks if isinstance(block, ToolUseBlock)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text(stream: bool) -> None:
    api = served("It is 3 °C.")
    message = await answer(
        api, stream, system="Be brief.", extra_body={"temperature": 0.25, "top_k": 4, "top_p": 0.5}
    )
    assert [block.text for block in message.content if isinstance(block, TextBlock)] == ["It is 3 °C."]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    (request,) = api.generator.requests
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(request.prompt), 13)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.25, 4, 0.5)
    assert last_rendered(api)["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_round_trip_with_tools(stream: bool) -> None:
    api = served(RECORDED["qwen2.5"].text)
    message = await answer(api, stream, tools=TOOLS)
    assert message.content[0].text == "I will look."
    assert called(message.content) == CALLS
    assert message.stop_reason == "tool_use"
    ids = [block.id for block in message.content[1:]]
    assert len(set(ids)) == 2
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [{"type": "text", "text": "3 °C"}]},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "noon", "is_error": False},
        {"type": "text", "text": "And?"},
    ]
    replayed = [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    await answer(api, tools=TOOLS, messages=[*ASK, *replayed])
    _, said, *rest = last_rendered(api)["messages"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in said["tool_calls"]] == CALLS
    assert [(m["role"], m.get("tool_call_id"), m["content"]) for m in rest] == [
        ("tool", ids[0], "3 °C"),
        ("tool", ids[1], "noon"),
        ("user", None, "And?"),
    ]
    assert last_rendered(api)["tools"][0]["function"]["parameters"] == WEATHER


async def test_the_events_come_in_anthropics_order() -> None:
    stream = await client(served(RECORDED["qwen2.5"].text)).messages.create(
        model=NAME, max_tokens=500, messages=ASK, tools=TOOLS, stream=True
    )
    kinds = [event.type async for event in stream]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    once = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    assert once == [
        "message_start",
        *block * 2,
        "content_block_start",
        *block[1:],
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_shown_to_who_asked_for_it(stream: bool) -> None:
    text = "Okay.\n</think>\n\nYes."
    asked: Any = {"type": "enabled", "budget_tokens": 1024}
    api = served(text, THINKS, MARKS, "<think>\n")
    message = await answer(api, stream, thinking=asked)
    thought, said = message.content
    assert isinstance(thought, ThinkingBlock)
    assert message.usage.output_tokens_details.thinking_tokens == 7
    assert (thought.thinking, said.text) == ("Okay.", "Yes.")
    budget = api.generator.requests[0].sampling.thinking
    assert budget is not None
    assert budget.max_tokens == 1024
    for options in ({}, {"thinking": {"type": "adaptive", "display": "omitted"}}):
        message = await answer(served(text, THINKS, MARKS, "<think>\n"), stream, **options)
        assert [block.type for block in message.content] == ["text"]
    replayed = [*ASK, {"role": "assistant", "content": [thought, said]}, *ASK]
    await answer(api, messages=replayed)
    assert last_rendered(api)["messages"][1]["reasoning_content"] == "Okay."


async def test_a_stream_is_not_silent_while_its_thinking_is_hidden() -> None:
    api = served("a" * 200 + "</think>Yes.", THINKS, MARKS, "<think>\n")
    stream = await api.post(PATH, {"model": NAME, "max_tokens": 500, "messages": ASK, "stream": True})
    assert stream.text.count('event: ping\ndata: {"type": "ping"}') == 3
    assert [block.text for block in (await answer(api, stream=True)).content] == ["Yes."]


async def test_a_model_is_told_not_to_think() -> None:
    api = served("Yes.", THINKS, MARKS, "<think></think>")
    message = await answer(api, thinking={"type": "disabled"})
    assert message.content[0].text == "Yes."
    assert last_rendered(api)["enable_thinking"] is False


@pytest.mark.parametrize(("effort", "told"), [("low", "low"), ("high", "high"), ("max", "high")])
async def test_a_model_is_told_the_effort_that_its_template_knows(effort: str, told: str | None) -> None:
    api = served("Yes.", "reasoning_effort")
    await answer(api, output_config={"effort": effort})
    assert last_rendered(api).get("reasoning_effort") == told


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_stopped(stream: bool) -> None:
    message = await answer(served("one, two, three"), stream, stop_sequences=["x", ", t"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
        "one",
        "stop_sequence",
        ", t",
    )
    message = await answer(served("one, two"), stream, max_tokens=3)
    assert (message.content[0].text, message.stop_reason) == ("one", "max_tokens")
    # Claude Code asks for 32,000 tokens whatever the model.
    small = replace(SETTINGS, max_context_tokens=80, vocab_size=400)
    api = Api(FakeGenerator("y" * 100), small, tokenizer=TemplateTokenizer(HERMES))
    message = await answer(api, stream, max_tokens=20_000)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.input_tokens + message.usage.output_tokens == 80


async def test_one_call_alone() -> None:
    message = await answer(
        served(RECORDED["qwen2.5"].text),
        tools=TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert called(message.content) == CALLS[:1]
    assert message.stop_reason == "tool_use"


async def test_arguments_that_are_no_object_are_not_lost() -> None:
    text = '<tool_call>\n{"name": "get_time", "arguments": {"zone": '
    message = await answer(served(text), tools=TOOLS)
    assert called(message.content) == [("get_time", {"text": '{"zone": '})]


async def test_tokens_are_counted_as_the_request_would_have_them() -> None:
    api = served("x")
    counted = await client(api).messages.count_tokens(
        model=NAME, messages=ASK, tools=TOOLS, system="Be brief."
    )
    await answer(api, tools=TOOLS, system="Be brief.")
    assert counted.input_tokens == len(api.generator.requests[0].prompt)
    assert len(api.generator.requests) == 1


async def test_a_key_comes_in_either_header() -> None:
    api = Api(FakeGenerator(), rules=Rules(CLASSES, {"": TenantRules((SecretStr("k"),))}))
    request: Any = {"model": NAME, "max_tokens": 5, "messages": ASK}
    assert (await client(api).messages.create(**request)).content
    assert (await api.post(PATH, request, authorization="Bearer k")).status_code == 200
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await client(api, "wrong").messages.create(**request)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


async def test_anthropics_client_finds_the_models() -> None:
    api = Api(FakeGenerator(), replace(SETTINGS, aliases=("claude",)))
    models = client(api).models
    page = await models.list()
    assert [model.id for model in page.data] == [NAME, "claude"]
    assert (page.first_id, page.last_id, page.has_next_page()) == (NAME, "claude", False)
    found = ModelInfo.model_validate((await models.retrieve("claude")).model_dump(), strict=True)
    assert (found.id, found.display_name, found.type) == ("claude", "claude", "model")
    assert found.max_input_tokens == SETTINGS.max_context_tokens
    with pytest.raises(anthropic.NotFoundError):
        await models.retrieve("other")


async def test_anthropics_client_knows_its_requests_by_their_ids() -> None:
    answered = await answer(served("x"))
    assert answered._request_id
    with pytest.raises(anthropic.BadRequestError) as refused:
        await answer(served("x"), extra_body={"top_k": -1})
    assert refused.value.request_id == refused.value.body["request_id"]  # type: ignore[index]


async def test_an_error_after_the_first_token_is_an_event() -> None:
    api = served("hello world")
    api.generator.fail_at = (4, Overloaded("too much", retry_after_s=2.0))
    with pytest.raises(anthropic.APIStatusError) as ended:
        await answer(api, stream=True)
    error = ended.value.body["error"]
    assert (error["type"], error["message"]) == ("rate_limit_error", "too much")


NO_TOOL = {"type": "tool", "name": "f"}
IMAGE = {"type": "image", "source": {"type": "file", "file_id": "f"}}


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": [*ASK, {"role": "assistant", "content": " "}]}, 400, "invalid_request_error", "with text"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "source.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            400,
            "invalid_request_error",
            "no user message has a block 'thinking'",
        ),
        ({"tools": [{"type": "other", "name": "w"}]}, 400, "invalid_request_error", "tools[0]"),
        ({"tools": TOOLS, "tool_choice": NO_TOOL}, 400, "invalid_request_error", "'f', which is no tool"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "'any', but there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name is required"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error", "the client runs the tools"),
        ({"context_management": {"edits": [{"type": "x"}]}}, 400, "invalid_request_error", "context_management"),
        ({"frequency_penalty": 1}, 400, "invalid_request_error", "goes with /v1/chat/completions"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, 400, "invalid_request_error", "constrained"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_by_name(
    body: dict[str, Any], status: int, kind: str, says: str
) -> None:
    whole = {"model": NAME, "max_tokens": 5, "messages": ASK, **body}
    response = await served("x").post(PATH, {name: v for name, v in whole.items() if v is not None})
    assert response.status_code == status, response.text
    said = response.json()
    assert (said["type"], said["error"]["type"]) == ("error", kind)
    assert said["request_id"] == response.headers["x-request-id"]
    assert says in said["error"]["message"]


def test_each_parameter_of_the_anthropic_package_is_known() -> None:
    for model, known in (
        (MessagesRequest, MessageCreateParamsBase),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
    ):
        assert set(get_type_hints(known)) <= set(model.model_fields) | set(MESSAGES_NEUTRAL)


async def test_an_answer_that_was_begun_goes_on() -> None:
    api = served("3 °C.")
    message = await answer(api, messages=[*ASK, {"role": "assistant", "content": "It is"}])
    assert [block.text for block in message.content if isinstance(block, TextBlock)] == ["3 °C."]
    assert last_rendered(api)["continue_final_message"] is True
    assert last_rendered(api)["messages"][-1] == {"role": "assistant", "content": "It is"}


async def test_cached_tokens_are_told_from_the_others() -> None:
    api = served("It is 3 °C.")
    api.generator.num_cached = 7
    for stream in (False, True):
        message = await answer(api, stream)
        num_prompt = len(api.generator.requests[0].prompt)
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (num_prompt - 7, 7)


async def test_a_path_that_is_not_there_is_refused_in_the_apis_form() -> None:
    for method, path in (("GET", PATH), ("POST", f"{PATH}/batches")):
        response = await served("x").http.request(method, path)
        assert response.json()["type"] == "error"
        assert response.json()["request_id"] == response.headers["x-request-id"]

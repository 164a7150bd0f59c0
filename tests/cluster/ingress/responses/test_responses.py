"""/v1/responses through the openai client, over a generator that writes what a model of the family would."""

import asyncio
from dataclasses import replace
from typing import Any, get_type_hints

import openai
import pytest
from openai.types.responses import response_create_params
from pydantic import SecretStr

from cluster.ingress.responses.responses_requests import RESPONSES_NEUTRAL, ResponsesRequest
from cluster.ingress.tenants.access import Rules, TenantRules
from core.errors import Overloaded
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import HERMES, last_rendered, served
from tests.cluster.ingress.parsers.recorded_texts import RECORDED, WEATHER
from tests.patience import PATIENCE_S, until

PATH = "/v1/responses"
ASK = "Weather in Zürich?"
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": WEATHER, "strict": None},
    {"type": "function", "name": "get_time", "parameters": {"type": "object"}, "strict": False},
]  # fmt: skip
CALLS = [("get_weather", '{"city": "Zürich", "days": 2}'), ("get_time", "{}")]
THINKS = ("<think></think>", ["<think>", "</think>"], "<think>\n")


async def answer(api: Api, stream: bool = False, **options: Any) -> Any:
    options = {"model": NAME, "input": ASK, **options}
    if not stream:
        return await api.openai.responses.create(**options)
    async with api.openai.responses.stream(**options) as events:
        async for event in events:
            last: Any = event
        return last.response


def called(response: Any) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text(stream: bool) -> None:
    api = served("It is 3 °C.")
    options: Any = {"temperature": 0.25, "top_p": 0.5, "metadata": {"a": "b"}, "extra_body": {"top_k": 4}}
    response = await answer(api, stream, instructions="Be brief.", **options)
    assert (response.output_text, response.status, response.model) == ("It is 3 °C.", "completed", NAME)
    assert (response.instructions, response.temperature, response.metadata) == ("Be brief.", 0.25, {"a": "b"})
    (request,) = api.generator.requests
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(request.prompt), 13)
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.25, 4, 0.5)
    assert last_rendered(api)["messages"][0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_a_round_trip_with_tools(stream: bool, stored: bool) -> None:
    api = served(RECORDED["qwen2.5"].text)
    response = await answer(api, stream, tools=TOOLS)
    assert (response.output[0].type, response.output_text) == ("message", "I will look.")
    assert called(response) == CALLS
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3 °C"} for item in response.output[1:]
    ]  # fmt: skip
    if stored:
        await answer(api, tools=TOOLS, input=results, previous_response_id=response.id)
    else:
        await answer(api, tools=TOOLS, input=[{"role": "user", "content": ASK}, *response.output, *results])
    asked, said, *told = last_rendered(api)["messages"]
    assert (asked["content"], said["content"]) == (ASK, "I will look.")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["get_weather", "get_time"]
    assert [m["tool_call_id"] for m in told] == [call["id"] for call in said["tool_calls"]]


SPACE: Any = {"type": "namespace", "name": "get_", "description": "About here.", "tools": [
    {**TOOLS[0], "name": "weather"}, {**TOOLS[1], "name": "time"},
]}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_a_namespace_are_called_by_their_names_in_it(stream: bool) -> None:
    """Codex sends the tools of an MCP server so."""
    text = RECORDED["qwen2.5"].text.replace("get_", "get__")
    api = served(text)
    response = await answer(api, stream, tools=[SPACE])
    assert [(c.namespace, c.name) for c in response.output[1:]] == [("get_", "weather"), ("get_", "time")]
    shown = [tool["function"] for tool in last_rendered(api)["tools"]]
    assert [(f["name"], f["description"]) for f in shown] == [
        ("get__weather", "About here.\nThe weather."),
        ("get__time", ""),
    ]
    await answer(api, tools=[SPACE], input=[{"role": "user", "content": ASK}, *response.output])
    said = last_rendered(api)["messages"][1]
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["get__weather", "get__time"]


async def test_an_item_may_be_named_by_its_id() -> None:
    """Vercel's AI SDK does so, as long as it believes that the server stores."""
    api = served(RECORDED["qwen2.5"].text)
    response = await answer(api, tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3 °C"}
        for item in response.output[1:]
    ]
    named = [{"type": "item_reference", "id": item.id} for item in response.output[1:]]
    text: Any = {"id": response.output[0].id}
    await answer(api, tools=TOOLS, input=[{"role": "user", "content": ASK}, text, *named, *results])
    _, said, *told = last_rendered(api)["messages"]
    assert said["content"] == "I will look."
    assert [call["id"] for call in said["tool_calls"]] == [m["tool_call_id"] for m in told]
    await api.openai.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError) as refused:
        await answer(api, tools=TOOLS, input=[*named, *results])
    assert (refused.value.code, refused.value.param) == ("item_not_found", "input")


async def test_the_events_come_in_openais_order() -> None:
    api = served(RECORDED["qwen2.5"].text)
    stream = await api.openai.responses.create(model=NAME, input=ASK, tools=TOOLS, stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    call = [
        "output_item.added",
        *(f"function_call_arguments.{end}" for end in ("delta", "done")),
        "output_item.done",
    ]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    assert once == [
        *("created", "in_progress", "output_item.added"),
        *text,
        *("output_item.done", *call, *call, "completed"),
    ]
    first = events[0].response
    assert (first.status, first.output) == ("in_progress", [])


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item_and_goes_back_into_the_template(stream: bool) -> None:
    api = served("Okay.\n</think>\n\nYes.", *THINKS)
    response = await answer(api, stream, include=["reasoning.encrypted_content"], store=False)
    thought, said = response.output
    assert (thought.content[0].text, said.content[0].text) == ("Okay.", "Yes.")
    assert response.usage.output_tokens_details.reasoning_tokens == 7
    await answer(
        api, input=[{"role": "user", "content": ASK}, *response.output, {"role": "user", "content": "?"}]
    )
    assert last_rendered(api)["messages"][1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Okay.",
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_text_comes_with_logprobs(stream: bool) -> None:
    response = await answer(served("é!"), stream, include=["message.output_text.logprobs"], top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert [entry.logprob for entry in entries] == [-0.5] * 3
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_is_incomplete(stream: bool) -> None:
    response = await answer(served("one, two"), stream, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("one", "incomplete")
    # More than the context has room for.
    response = await answer(Api(FakeGenerator("y" * 300)), stream, max_output_tokens=100_000)
    assert response.status == "incomplete"
    assert response.usage.total_tokens == SETTINGS.max_context_tokens


async def test_the_tools_that_are_allowed_are_shown() -> None:
    api = served("Done.")
    choice: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    await answer(api, tools=TOOLS, tool_choice=choice)
    assert [tool["function"]["name"] for tool in last_rendered(api)["tools"]] == ["get_time"]


async def test_tokens_are_counted_as_a_response_would_have_them() -> None:
    api = Api(FakeGenerator("hello"))
    responses = api.openai.responses
    first = await responses.create(model=NAME, input="a", instructions="Be brief.")
    asked: Any = {"model": NAME, "input": "b", "instructions": "Be kind.", "previous_response_id": first.id}
    counted = await responses.input_tokens.count(**asked)
    assert (counted.object, len(api.generator.requests)) == ("response.input_tokens", 1)
    second = await responses.create(**asked)
    assert second.usage is not None
    assert second.usage.input_tokens == counted.input_tokens > len("hello")


async def test_a_stored_response_is_found_and_deleted() -> None:
    responses = Api(FakeGenerator("hello")).openai.responses
    first = await responses.create(model=NAME, input="a")
    second = await responses.create(model=NAME, input="b", previous_response_id=first.id)
    assert (await responses.retrieve(second.id)).output_text == "hello"
    items: Any = [item async for item in responses.input_items.list(second.id)]
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "b"),
        ("assistant", "hello"),
        ("user", "a"),
    ]
    await responses.delete(first.id)
    for gone in (responses.retrieve(first.id), responses.delete("resp_x")):
        with pytest.raises(openai.NotFoundError) as refused:
            await gone
        assert refused.value.code == "response_not_found"
    # The second has the conversation of its own.
    assert (
        await responses.create(model=NAME, input="c", previous_response_id=second.id)
    ).output_text == "hello"


async def test_the_items_of_a_long_conversation_come_in_pages() -> None:
    responses = Api(FakeGenerator(), replace(SETTINGS, max_context_tokens=1000)).openai.responses
    said: Any = [{"role": "user", "content": str(n)} for n in range(45)]
    response = await responses.create(model=NAME, input=said, max_output_tokens=3)
    first = await responses.input_items.list(response.id)
    assert (len(first.data), first.has_more) == (20, True)
    found: Any = [item async for item in responses.input_items.list(response.id, order="asc", limit=7)]
    assert [item.content[0].text for item in found] == [item["content"] for item in said]


async def test_what_is_not_to_be_stored_is_not() -> None:
    responses = Api(FakeGenerator()).openai.responses
    kept_not = await responses.create(model=NAME, input="a", store=False)
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(kept_not.id)
    with pytest.raises(openai.NotFoundError) as refused:
        await responses.create(model=NAME, input="b", previous_response_id=kept_not.id)
    assert refused.value.param == "previous_response_id"


async def test_the_store_has_a_bound_and_the_oldest_make_room() -> None:
    responses = Api(FakeGenerator(), replace(SETTINGS, response_store_bytes=4000)).openai.responses
    ids = [(await responses.create(model=NAME, input="a")).id for _ in range(8)]
    found = [await there(responses, response_id) for response_id in ids]
    assert found == sorted(found)
    assert 0 < sum(found) < len(found)


async def there(responses: Any, response_id: str) -> bool:
    try:
        await responses.retrieve(response_id)
    except openai.NotFoundError:
        return False
    return True


@pytest.mark.parametrize(
    "tenants",
    [
        {"a": TenantRules((SecretStr("ka"),)), "b": TenantRules((SecretStr("kb"),))},
        {"": TenantRules((SecretStr("ka"), SecretStr("kb")))},
    ],
    ids=["tenants", "keys without one"],
)
async def test_anothers_responses_are_not_there(tenants: dict[str, TenantRules]) -> None:
    rules = Rules(CLASSES, {"": TenantRules(), **tenants})
    api = Api(FakeGenerator(), rules=rules)
    mine, theirs = (api.openai.with_options(api_key=key).responses for key in ("ka", "kb"))
    response = await mine.create(model=NAME, input="secret")
    assert await there(mine, response.id)
    assert not await there(theirs, response.id)
    with pytest.raises(openai.NotFoundError):
        await theirs.create(model=NAME, input="b", previous_response_id=response.id)


async def ended(responses: Any, response: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while response.status == "in_progress":
            await asyncio.sleep(0.005)
            response = await responses.retrieve(response.id)
    return response


async def test_a_background_response_ends_by_itself() -> None:
    api = Api(FakeGenerator("hello"))
    api.generator.stall_at, responses = 3, api.openai.responses
    response = await responses.create(model=NAME, input="a", background=True)
    assert (response.status, response.output) == ("in_progress", [])
    with pytest.raises(openai.BadRequestError) as refused:
        await responses.create(model=NAME, input="b", previous_response_id=response.id)
    assert "in_progress" in refused.value.message
    api.generator.go_on.set()
    response = await ended(responses, response)
    assert (response.status, response.output_text) == ("completed", "hello")


@pytest.mark.parametrize("way", ["cancel", "delete"])
async def test_a_background_response_is_cancelled(way: str) -> None:
    api = Api(FakeGenerator())
    api.generator.stall_at = 3
    responses = api.openai.responses
    response = await responses.create(model=NAME, input="a", background=True)
    await until(lambda: bool(api.generator.requests))
    if way == "cancel":
        assert (await responses.cancel(response.id)).status == "cancelled"
        assert (await responses.retrieve(response.id)).status == "cancelled"
    else:
        await responses.delete(response.id)
    await until(lambda: api.generator.closed == ["r1"])
    assert await there(responses, response.id) == (way == "cancel")


async def test_a_background_response_that_fails_says_why() -> None:
    api = Api(FakeGenerator())
    api.generator.fail_at = (0, Overloaded("too much", retry_after_s=2.0))
    responses = api.openai.responses
    response = await ended(responses, await responses.create(model=NAME, input="a", background=True))
    assert response.error is not None
    assert (response.status, response.error.code, response.error.message) == (
        "failed",
        "rate_limit_exceeded",
        "too much",
    )


async def test_a_stream_that_fails_ends_with_what_had_come() -> None:
    api = Api(FakeGenerator("hello world"))
    api.generator.fail_at = (4, Overloaded("too much", retry_after_s=2.0))
    stream = await api.openai.responses.create(model=NAME, input="a", stream=True)
    events: list[Any] = [event async for event in stream]
    last = events[-1].response
    assert (last.status, last.error.message, last.output_text) == ("failed", "too much", "hell")


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"input": IMAGE}, "input", "input[0].content[0].image_url: the model"),
        ({"input": [{"type": "computer_call"}]}, "input", "items are message, function_call"),
        ({"tools": [{"type": "fucntion"}]}, "tools", "tools[0]: a tool's type must be 'function' or 'namespace'"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools", "tools[0].name is required"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "tools", "tools[0].tools must have at least 1 item"),
        ({"max_tool_calls": 3}, "max_tool_calls", "the client runs the tools"),
        ({"background": True, "stream": True}, "stream", "not streamed"),
        ({"background": True, "store": False}, "background", "must be stored"),
        ({"temperature": 3}, "temperature", "temperature must be at most 2, not 3"),
        ({"max_tokens": 3}, "max_tokens", "it is called max_output_tokens here"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "cannot be constrained"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f', which is no tool"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], param: str, says: str) -> None:
    refused = await served("x", HERMES).post(PATH, {"model": NAME, "input": "x", **body})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param
    assert says in refused.json()["error"]["message"]


async def test_only_a_background_response_is_cancelled() -> None:
    responses = Api(FakeGenerator()).openai.responses
    response = await responses.create(model=NAME, input="a")
    with pytest.raises(openai.BadRequestError) as refused:
        await responses.cancel(response.id)
    assert "close the connection" in refused.value.message


def test_each_parameter_of_the_openai_package_is_known() -> None:
    known = set(get_type_hints(response_create_params.ResponseCreateParamsBase)) | {"stream"}
    assert known <= set(ResponsesRequest.model_fields) | set(RESPONSES_NEUTRAL)

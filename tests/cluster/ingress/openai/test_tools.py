"""Tools through the openai client, over a generator that writes what a model of the family would."""

from typing import Any

import openai
import pytest

from cluster.ingress.parsers import harmony
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHATS, Api
from tests.cluster.ingress.api.template_fakes import (
    ASK,
    FUNCTION,
    HERMES,
    TOOLS,
    TokenGenerator,
    last_rendered,
    served,
)
from tests.cluster.ingress.parsers.recorded_texts import RECORDED


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


TWO = [("get_weather", '{"city": "Zürich", "days": 2}'), ("get_time", "{}")]


async def test_a_round_trip_with_tools() -> None:
    api = served(RECORDED["qwen2.5"].text)
    answer = await api.openai.chat.completions.create(model=NAME, messages=ASK, tools=TOOLS)
    message = answer.choices[0].message
    assert (message.content, called(message)) == ("I will look.", TWO)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert last_rendered(api)["tools"] == TOOLS
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == 2
    replies: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "3 °C"} for call in calls]
    sent_back: Any = message.model_dump()
    await api.openai.chat.completions.create(model=NAME, messages=[*ASK, sent_back, *replies], tools=TOOLS)
    replayed = last_rendered(api)["messages"]
    assert replayed[1]["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": {"city": "Zürich", "days": 2},
    }
    assert [m["tool_call_id"] for m in replayed[2:]] == [call.id for call in calls]


async def test_the_tools_that_are_allowed_are_shown() -> None:
    api = served(RECORDED["qwen2.5"].text)
    time: Any = {"type": "function", "function": {"name": "get_time"}}

    async def ask(mode: str, *tools: Any) -> Any:
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}
        await api.openai.chat.completions.create(model=NAME, messages=ASK, tools=TOOLS, tool_choice=choice)

    await ask("auto", time)
    assert last_rendered(api)["tools"] == [time]
    with pytest.raises(
        openai.BadRequestError, match="tool_choice: this server's tokenizer cannot be constra|tools: "
    ):
        await ask("required", time)
    with pytest.raises(openai.BadRequestError, match="'get_money', which is no tool"):
        await ask("auto", {"type": "function", "function": {"name": "get_money"}})


async def test_calls_are_streamed_with_their_name_before_their_arguments() -> None:
    api = served(RECORDED["qwen2.5"].text)
    stream = await api.openai.chat.completions.create(model=NAME, messages=ASK, tools=TOOLS, stream=True)
    chunks = [chunk async for chunk in stream]
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    first = next(delta for delta in deltas if delta.index == 0)
    assert first.id
    assert first.function is not None
    assert (first.function.name, first.function.arguments) == ("get_weather", "")
    texts = {0: "", 1: ""}
    for delta in deltas:
        assert delta.function is not None
        texts[delta.index] += delta.function.arguments or ""
    assert [texts[0], texts[1]] == [arguments for _, arguments in TWO]
    assert sum(delta.index == 0 for delta in deltas) > 10
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "I will look."
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["tool_calls"]


async def test_the_sdks_stream_helper_collects_what_the_whole_answer_has() -> None:
    api = served(RECORDED["qwen3"].text, HERMES + "</think>")
    async with api.openai.chat.completions.stream(model=NAME, messages=ASK, tools=TOOLS) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert called(final.choices[0].message) == TWO
    assert final.choices[0].finish_reason == "tool_calls"


async def test_without_parallel_calls_the_generation_ends_after_the_first() -> None:
    api = served(RECORDED["qwen2.5"].text)
    answer = await api.openai.chat.completions.create(
        model=NAME, messages=ASK, tools=TOOLS, parallel_tool_calls=False
    )
    assert called(answer.choices[0].message) == TWO[:1]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert api.generator.closed == ["r1"]


async def test_each_choice_has_calls_of_its_own() -> None:
    api = served(RECORDED["qwen3"].text, HERMES + "</think>")
    answer = await api.openai.chat.completions.create(model=NAME, messages=ASK, tools=TOOLS, n=3)
    assert [called(choice.message) for choice in answer.choices] == [TWO] * 3
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    assert len({call.id for choice in answer.choices for call in choice.message.tool_calls or ()}) == 6


async def test_with_tool_choice_none_the_model_sees_no_tool_and_its_text_stays() -> None:
    api = served(RECORDED["qwen2.5"].text)
    answer = await api.openai.chat.completions.create(
        model=NAME, messages=ASK, tools=TOOLS, tool_choice="none"
    )
    assert answer.choices[0].message.content == RECORDED["qwen2.5"].text
    assert last_rendered(api)["tools"] is None


async def test_a_call_that_the_limit_cuts_ends_with_length() -> None:
    api = served(RECORDED["qwen2.5"].text)
    answer = await api.openai.chat.completions.create(model=NAME, messages=ASK, tools=TOOLS, max_tokens=80)
    (name, arguments), *_ = called(answer.choices[0].message)
    assert name == "get_weather"
    assert '{"city": "Zürich", "days": 2}'.startswith(arguments)
    assert answer.choices[0].finish_reason == "length"


async def test_logprobs_stand_beside_the_calls_once_for_each_token() -> None:
    api = served(RECORDED["qwen2.5"].text)
    stream = await api.openai.chat.completions.create(
        model=NAME, messages=ASK, tools=TOOLS, logprobs=True, stream=True
    )
    entries = [e async for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()]
    assert isinstance(api.generator, TokenGenerator)
    assert len(entries) == len(api.generator.ids) + 1


MARKS = [harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.END, harmony.CONSTRAIN, harmony.CALL]


async def test_special_tokens_that_the_format_needs_are_seen_and_others_are_not() -> None:
    text = RECORDED["gpt-oss call"].text.replace("Which", "<odd>Which") + harmony.CALL
    api = served(text, "<|channel|>", [*MARKS, "<odd>"])
    answer = await api.openai.chat.completions.create(model=NAME, messages=ASK, tools=TOOLS)
    message: Any = answer.choices[0].message
    assert called(message) == TWO[:1]
    assert (message.content, message.reasoning_content, message.reasoning) == (None, *["Which city?"] * 2)


async def test_a_template_that_concatenates_gets_text() -> None:
    api = served("Done.", HERMES + "concatenates")
    call = {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages: list[Any] = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    await api.openai.chat.completions.create(model=NAME, messages=messages)
    replayed = last_rendered(api)["messages"][1]
    assert (replayed["content"], replayed["tool_calls"][0]["function"]["arguments"]) == ("", "{}")


async def test_mistrals_ids_are_as_short_as_its_template_wants() -> None:
    api = served(RECORDED["mistral"].text, "[TOOL_CALLS]", ["[TOOL_CALLS]"])
    answer = await api.openai.chat.completions.create(model=NAME, messages=ASK, tools=TOOLS)
    assert called(answer.choices[0].message) == TWO
    assert all(len(call.id) == 9 for call in answer.choices[0].message.tool_calls or ())
    call = {"id": "call_abcdefghijk", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages: list[Any] = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_abcdefghijk", "content": "noon"},
    ]
    await api.openai.chat.completions.create(model=NAME, messages=messages, tools=TOOLS)
    replayed = last_rendered(api)["messages"]
    assert replayed[1]["tool_calls"][0]["id"] == replayed[2]["tool_call_id"] == "cdefghijk"


CALL_OF_TEXT = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "oops"}}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function is required"),
        ({"tools": TOOLS + TOOLS}, "tools", "two tools are called 'get_weather'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "'f', which is no tool",
        ),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools", "tokenizer cannot be constrained"),
        (
            {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
            "tools",
            "tokenizer cannot be constrained",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "custom"}},
            "tool_choice",
            "tool_choice.type must be 'function' or 'allowed_tools', not 'custom'",
        ),
        ({"functions": [FUNCTION]}, "functions", "tools"),
        ({"function_call": {"name": "f"}}, "function_call", "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'huge'"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "no token that ends its reasoning"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0]: content is required"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL_OF_TEXT]}]},
            "messages",
            "only an assistant's",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_name(body: dict[str, Any], param: str, says: str) -> None:
    answer = await served("x").post(CHATS, {"model": NAME, "messages": ASK, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ["oops", '{"city": "Zür', "[1]", '{"a": ' * 140 + "1" + "}" * 140])
async def test_a_conversation_goes_on_behind_arguments_that_are_no_object(arguments: str) -> None:
    """A limit of tokens cuts them, and an agent sends them back with what its parser said."""
    api = served("Sorry.")
    call: Any = {"id": "c", "type": "function", "function": {"name": "get_time", "arguments": arguments}}
    replayed: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "no JSON"},
    ]
    await api.openai.chat.completions.create(model=NAME, messages=replayed, tools=TOOLS)
    (said,) = last_rendered(api)["messages"][1]["tool_calls"]
    assert said["function"]["arguments"] == {"text": arguments}


async def test_a_model_of_no_known_format_refuses_tools_and_says_what_to_set() -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await served("x", "{{ messages }}").openai.chat.completions.create(
            model=NAME, messages=ASK, tools=TOOLS
        )
    assert "--tool-call-parser" in refused.value.message


async def test_calls_that_the_template_would_leave_out_are_refused() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    replayed: list[Any] = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError) as refused:
        await Api(FakeGenerator()).openai.chat.completions.create(model=NAME, messages=replayed)
    assert refused.value.param == "messages"
    assert "renders no tool calls" in refused.value.message


async def test_null_content_without_calls_is_empty_text() -> None:
    api = Api(FakeGenerator())
    messages: list[Any] = [*ASK, {"role": "assistant", "content": None}, *ASK]
    await api.openai.chat.completions.create(model=NAME, messages=messages)
    assert b"assistant: \nuser: " in bytes(api.generator.requests[0].prompt)

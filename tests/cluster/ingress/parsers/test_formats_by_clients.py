"""Calls of every format, as the vendors' own clients get them: chats, Responses and Messages, streamed and not."""

import json
from dataclasses import replace
from typing import Any

import pytest

from core.config.answer_formats import ReasoningFormat
from tests.cluster.ingress.anthropic.test_messages import client as anthropic_client
from tests.cluster.ingress.api.fakes import NAME, ByteTokenizer, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.parsers.family_markup import MARKUPS
from tests.cluster.ingress.parsers.written_calls import CALL, SCHEMAS, TIME

ASK = "How is the weather, and what time is it?"
MESSAGES: Any = [{"role": "user", "content": ASK}]
USED = {name: SCHEMAS[name] for name, _ in (CALL, TIME)}
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in USED.items()]
OF_CHATS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
OF_RESPONSES: Any = [{"type": "function", **function} for function in FUNCTIONS]
OF_MESSAGES: Any = [{"name": name, "input_schema": schema} for name, schema in USED.items()]
Calls = list[tuple[str, Any]]


class ShowsTools(ByteTokenizer):
    """Its chat template shows all that a conversation has."""

    def render_chat(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **_: Any
    ) -> str:
        return json.dumps([tools, list(messages)]) + ("assistant: " if add_generation_prompt else "")


async def chat(api: Api) -> tuple[Calls, str]:
    answer = await api.openai.chat.completions.create(model=NAME, messages=MESSAGES, tools=OF_CHATS)
    (choice,) = answer.choices
    called: Any = choice.message.tool_calls or []
    return [(one.function.name, json.loads(one.function.arguments)) for one in called], str(
        choice.finish_reason
    )


async def streamed_chat(api: Api) -> tuple[Calls, str]:
    found: dict[int, tuple[str, str]] = {}
    finish = ""
    async for chunk in await api.openai.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=OF_CHATS, stream=True
    ):
        for one in chunk.choices[0].delta.tool_calls or []:
            name, text = found.get(one.index, ("", ""))
            assert one.function is not None
            found[one.index] = name + (one.function.name or ""), text + (one.function.arguments or "")
        finish = chunk.choices[0].finish_reason or finish
    return [(name, json.loads(text)) for name, text in found.values()], finish


async def responses(api: Api) -> tuple[Calls, str]:
    answer = await api.openai.responses.create(model=NAME, input=ASK, tools=OF_RESPONSES)
    called = [item for item in answer.output if item.type == "function_call"]
    return [(one.name, json.loads(one.arguments)) for one in called], _as_chat(answer.status == "completed")


async def streamed_responses(api: Api) -> tuple[Calls, str]:
    names: dict[str, str] = {}
    calls: Calls = []
    whole = False
    async with api.openai.responses.stream(model=NAME, input=ASK, tools=OF_RESPONSES) as stream:
        async for event in stream:
            if event.type == "response.output_item.added" and event.item.type == "function_call":
                names[event.item.id or ""] = event.item.name
            elif event.type == "response.function_call_arguments.done":
                calls.append((names[event.item_id], json.loads(event.arguments)))
            whole = whole or event.type == "response.completed"
    return calls, _as_chat(whole)


async def messages(api: Api) -> tuple[Calls, str]:
    answer = await anthropic_client(api).messages.create(
        model=NAME, max_tokens=2000, messages=MESSAGES, tools=OF_MESSAGES
    )
    called = [block for block in answer.content if block.type == "tool_use"]
    return [(one.name, one.input) for one in called], _as_chat(answer.stop_reason == "tool_use")


async def streamed_messages(api: Api) -> tuple[Calls, str]:
    stream = anthropic_client(api).messages.stream(
        model=NAME, max_tokens=2000, messages=MESSAGES, tools=OF_MESSAGES
    )
    async with stream as events:
        answer = await events.get_final_message()
    called = [block for block in answer.content if block.type == "tool_use"]
    return [(one.name, one.input) for one in called], _as_chat(answer.stop_reason == "tool_use")


def _as_chat(calls: bool) -> str:
    return "tool_calls" if calls else "stop"


ASKING = (chat, streamed_chat, responses, streamed_responses, messages, streamed_messages)


@pytest.mark.parametrize("name", MARKUPS)
async def test_clients_get_the_calls_of_every_format(name: str) -> None:
    markup = MARKUPS[name]
    wanted = [CALL] if markup.one_call else [CALL, TIME]
    reasoning: ReasoningFormat = "harmony" if markup.tools == "harmony" else "none"
    settings = replace(
        SETTINGS, tool_call_parser=markup.tools, reasoning_parser=reasoning, max_context_tokens=4000
    )
    api = Api(FakeGenerator(markup.write(*wanted)), settings, tokenizer=ShowsTools())
    for ask in ASKING:
        assert (ask.__name__, await ask(api)) == (ask.__name__, (wanted, "tool_calls"))

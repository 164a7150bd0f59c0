"""Reasoning, and what a chat template gets of a conversation, through the openai client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.errors import RequestError
from core.types import ThinkingBudget
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import (
    ASK,
    HERMES,
    TOOLS,
    TemplateTokenizer,
    TokenGenerator,
    last_rendered,
    served,
)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_stands_apart_from_the_answer_and_is_counted(stream: bool) -> None:
    api = served("Okay.\n</think>\n\nYes.", "<think></think>", ["<think>", "</think>"], "<think>\n")
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    answer: Any = await api.openai.chat.completions.create(model=NAME, messages=ASK, stream=stream, **options)
    if stream:
        chunks = [chunk async for chunk in answer]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
        usage = chunks[-1].usage
    else:
        message = answer.choices[0].message
        reasoning, content, usage = message.reasoning_content, message.content, answer.usage
    assert (reasoning, content) == ("Okay.", "Yes.")
    # "Okay.", a newline and the mark.
    assert usage.completion_tokens_details.reasoning_tokens == 7


class OneSystemTokenizer(TemplateTokenizer):
    """Refuses a system message that is not the first, as Qwen3.5's template does, or leaves it out, as gpt-oss' does."""

    refuses = True

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *others: Any, **more: Any) -> str:
        later = [message for message in messages[1:] if message["role"] == "system"]
        if later and self.refuses:
            raise RequestError("System message must be at the beginning.", field="messages")
        return super().render_chat([m for m in messages if m not in later], *others, **more)


@pytest.mark.parametrize("refuses", [True, False])
async def test_two_system_messages_are_one_for_templates_that_take_one(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneSystemTokenizer, "refuses", refuses)
    tokenizer = OneSystemTokenizer(HERMES)
    api = Api(TokenGenerator("Yes.", tokenizer), replace(SETTINGS, vocab_size=400), tokenizer=tokenizer)
    told: Any = [{"role": "developer", "content": "In English."}, *ASK]
    await api.openai.responses.create(model=NAME, instructions="Be brief.", input=told)
    assert tokenizer.rendered[-1]["messages"] == [
        {"role": "system", "content": "Be brief.\n\nIn English."},
        *ASK,
    ]
    await api.openai.chat.completions.create(model=NAME, messages=ASK)
    assert tokenizer.rendered[-1]["messages"] == ASK


async def test_a_conversations_tokens_are_those_of_its_prompt() -> None:
    api = served("Yes.")
    wish = {"messages": ASK, "tools": TOOLS, "chat_template_kwargs": {"other": 1}}
    counted = (await api.post("/tokenize", wish)).json()
    told = last_rendered(api)
    await api.openai.chat.completions.create(
        model=NAME, messages=ASK, tools=TOOLS, extra_body={"chat_template_kwargs": {"other": 1}}
    )
    assert tuple(counted["tokens"]) == api.generator.requests[0].prompt
    assert last_rendered(api) == told
    assert told["tools"]


async def test_an_answer_without_reasoning_counts_none() -> None:
    answer = await served("Yes.").openai.chat.completions.create(model=NAME, messages=ASK)
    assert answer.usage
    assert answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


async def test_a_model_that_is_told_not_to_think_answers_at_once() -> None:
    api = served("Yes.", "enable_thinking <think></think>", ["<think>", "</think>"], "<think></think>")
    answer: Any = await api.openai.chat.completions.create(
        model=NAME, messages=ASK, reasoning_effort="none", extra_body={"chat_template_kwargs": {"other": 1}}
    )
    assert answer.choices[0].message.content == "Yes."
    assert last_rendered(api)["enable_thinking"] is False
    assert last_rendered(api)["other"] == 1


async def test_effort_reaches_the_template_that_knows_it() -> None:
    api = served("Yes.", "{{ reasoning_effort }}")
    await api.openai.chat.completions.create(model=NAME, messages=ASK, reasoning_effort="high")
    assert last_rendered(api)["reasoning_effort"] == "high"


async def test_a_budget_travels_with_the_tokens_that_it_is_about() -> None:
    marks = ["<think>", "</think>"]
    for ending, begin in (("", (300,)), ("<think>\n", ())):
        api = served("Yes.", "<think></think>", marks, ending)
        await api.openai.chat.completions.create(
            model=NAME, messages=ASK, extra_body={"thinking_token_budget": 5}
        )
        assert api.generator.requests[0].sampling.thinking == ThinkingBudget(
            max_tokens=5, begin=begin, end=(301,), forced=(301,)
        )

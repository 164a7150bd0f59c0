"""Stop strings of every route: they end what is said, and never a call or the reasoning."""

from typing import Any

import pytest

from tests.cluster.ingress.anthropic import test_messages
from tests.cluster.ingress.anthropic.test_messages import MARKS, THINKS
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import CHATS, COMPLETIONS, Api
from tests.cluster.ingress.api.template_fakes import ASK, HERMES, TOOLS, served
from tests.cluster.ingress.openai.test_tools import TWO, called
from tests.cluster.ingress.parsers.recorded_texts import RECORDED
from tests.cluster.ingress.responses import test_responses

CALLS = RECORDED["qwen2.5"].text
STREAMS = pytest.mark.parametrize("stream", [False, True])


async def chat(api: Api, stream: bool, **options: Any) -> Any:
    """Return the choice, with the number of tokens that were generated for it."""
    options = {"model": NAME, "messages": ASK, **options}
    if not stream:
        whole = await api.openai.chat.completions.create(**options)
        return whole.choices[0], whole.usage
    async with api.openai.chat.completions.stream(
        **options, stream_options={"include_usage": True}
    ) as events:
        async for _ in events:
            pass
        whole = await events.get_final_completion()
    return whole.choices[0], whole.usage


@STREAMS
@pytest.mark.parametrize("stop", ["days", "Zürich", '"', "}", "</tool_call>", "<tool_call>", "arguments"])
async def test_a_call_is_whole_whatever_stop_string_stands_in_it(stop: str, stream: bool) -> None:
    choice, _ = await chat(served(CALLS), stream, tools=TOOLS, stop=[stop])
    assert (choice.message.content, called(choice.message)) == ("I will look.", TWO)
    assert choice.finish_reason == "tool_calls"


@STREAMS
async def test_what_is_said_ends_before_its_stop_string_and_no_call_follows(stream: bool) -> None:
    api = served(CALLS)
    choice, usage = await chat(api, stream, tools=TOOLS, stop=["look"])
    assert (choice.message.content, called(choice.message), choice.finish_reason) == ("I will ", [], "stop")
    assert usage.completion_tokens == len("I will look")
    assert api.generator.closed == ["r1"]


@STREAMS
async def test_a_stop_string_in_the_reasoning_ends_nothing(stream: bool) -> None:
    text = "One\n\ntwo.\n</think>\n\nOne, two.\n\n\n\n\n"
    for stop, said in (("two", "One, "), ("One", ""), ("\n\n", "One, two.")):
        choice, _ = await chat(served(text, THINKS, MARKS, "<think>\n"), stream, stop=stop)
        assert (choice.message.content or "", choice.message.reasoning) == (said, "One\n\ntwo."), stop
        assert choice.finish_reason == "stop"


async def test_white_space_ends_an_answer_when_it_is_written() -> None:
    api = served("Hm.</think>\n\nOne.\n\n\n\nTwo.", THINKS, MARKS, "<think>\n")
    _, usage = await chat(api, False, stop="\n\n")
    assert usage.completion_tokens == len("Hm.X\n\nOne.\n\n")


@STREAMS
async def test_the_stop_string_is_shown_to_who_asks_for_it(stream: bool) -> None:
    body = {"stop": ["look"], "extra_body": {"include_stop_str_in_output": True}}
    choice, _ = await chat(served(CALLS), stream, tools=TOOLS, **body)
    assert (choice.message.content, choice.finish_reason) == ("I will look", "stop")


SPECIAL = ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    "stop", ["<|im_end|>", "<|im_end|>\n<|im_start|>", "\n<|im_start|>user", "<|im_start|>u"]
)
async def test_a_stop_string_may_name_special_tokens(stop: str) -> None:
    text = "Yes.<|im_end|>\n<|im_start|>user\nNo?"
    said = text[: text.index(stop)].replace("<|im_end|>", "")
    api = served(text, HERMES, SPECIAL)
    for stream in (False, True):
        choice, _ = await chat(api, stream, stop=stop)
        assert (choice.message.content, choice.finish_reason) == (said, "stop")
        choice, _ = await chat(api, stream, stop=stop, tools=TOOLS)
        assert (choice.message.content, choice.finish_reason) == (
            said.rstrip(),
            "stop",
        ) or stop != "<|im_end|>"
    answer = (
        await api.post(COMPLETIONS, {"model": NAME, "prompt": "x", "max_tokens": 99, "stop": stop})
    ).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (said, "stop")
    assert len(api.generator.closed) == 5
    message = await test_messages.answer(api, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


async def test_special_tokens_that_no_stop_string_names_stay_hidden() -> None:
    choice, _ = await chat(
        served("Yes.<|im_end|>\n<|im_start|>No.", HERMES, SPECIAL), False, stop="<|im_start|>x"
    )
    assert (choice.message.content, choice.finish_reason) == ("Yes.\nNo.", "stop")


@STREAMS
async def test_a_stop_string_may_name_the_token_that_ends_an_answer(stream: bool) -> None:
    message = await test_messages.answer(served("Yes."), stream, stop_sequences=["<end>"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
        "Yes.",
        "stop_sequence",
        "<end>",
    )
    message = await test_messages.answer(
        served(CALLS), stream, stop_sequences=["<end>"], tools=test_messages.TOOLS
    )
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert test_messages.called(message.content) == test_messages.CALLS


@STREAMS
async def test_messages_and_responses_stop_in_text_alone(stream: bool) -> None:
    message = await test_messages.answer(
        served(CALLS), stream, stop_sequences=["days"], tools=test_messages.TOOLS
    )
    assert (message.stop_reason, test_messages.called(message.content)) == ("tool_use", test_messages.CALLS)
    message = await test_messages.answer(
        served(CALLS), stream, stop_sequences=["will"], tools=test_messages.TOOLS
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "will")
    assert [block.type for block in message.content] == ["text"]
    response = await test_responses.answer(
        served(CALLS), stream, tools=test_responses.TOOLS, extra_body={"stop": ["days", "will"]}
    )
    assert (response.status, [item.type for item in response.output]) == ("completed", ["message"])
    assert response.output_text == "I "


async def test_a_stop_string_waits_for_the_least_number_of_tokens() -> None:
    text = "Hm.</think>ab ab ab"
    api = served(text, THINKS, MARKS, "<think>\n")
    body = {"model": NAME, "messages": ASK, "stop": ["ab"], "min_tokens": 6}
    message = (await api.post(CHATS, body)).json()["choices"][0]["message"]
    assert message["content"] == "ab "

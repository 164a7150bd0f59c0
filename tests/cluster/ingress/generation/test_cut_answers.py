"""A call that is not whole is never taken for one: of every route, whole and streamed."""

from typing import Any

import pytest

from tests.cluster.ingress.anthropic import test_messages
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import CHATS
from tests.cluster.ingress.api.template_fakes import ASK, TOOLS, served
from tests.cluster.ingress.generation.test_stops import chat
from tests.cluster.ingress.openai.test_tools import TWO, called
from tests.cluster.ingress.parsers.recorded_texts import RECORDED
from tests.cluster.ingress.responses import test_responses
from tests.cluster.ingress.responses.test_responses import PATH

CALLS = RECORDED["qwen2.5"].text
WITHIN_FIRST = len(CALLS[: CALLS.index("days")].encode())
AFTER_FIRST = len(CALLS[: CALLS.index("</tool_call>")].encode())
WITHIN_SECOND = len(CALLS[: CALLS.index('"arguments": {}') + len('"arguments": {')].encode())
HALF = '{"city": "Zürich", "'
STREAMS = pytest.mark.parametrize("stream", [False, True])


@STREAMS
async def test_a_response_says_which_of_its_calls_are_whole(stream: bool) -> None:
    async def ask(max_tokens: int) -> Any:
        return await test_responses.answer(
            served(CALLS), stream, tools=test_responses.TOOLS, max_output_tokens=max_tokens
        )

    cut = await ask(WITHIN_FIRST)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in cut.output] == ["completed", "incomplete"]
    assert cut.output[1].arguments == HALF
    cut = await ask(WITHIN_SECOND)
    assert [item.status for item in cut.output] == ["completed", "completed", "incomplete"]
    cut = await ask(AFTER_FIRST)
    assert (cut.status, [item.status for item in cut.output]) == ("incomplete", ["completed", "completed"])
    assert cut.output[1].arguments == TWO[0][1]
    whole = await ask(500)
    assert (whole.status, [item.status for item in whole.output]) == ("completed", ["completed"] * 3)


@STREAMS
async def test_a_response_that_was_cut_while_thinking_says_so_of_its_reasoning(stream: bool) -> None:
    template, marks, prompt = test_responses.THINKS
    api = served("Let me see.</think>Yes.", template, marks, prompt)
    cut = await test_responses.answer(api, stream, max_output_tokens=6)
    assert (cut.status, [(item.type, item.status) for item in cut.output]) == (
        "incomplete",
        [("reasoning", "incomplete")],
    )


async def test_the_events_of_a_cut_call_do_not_say_that_it_is_done() -> None:
    api = served(CALLS)
    body = {"model": NAME, "input": "x", "tools": test_responses.TOOLS, "max_output_tokens": WITHIN_FIRST}
    stream = (await api.post(PATH, {**body, "stream": True})).text
    assert "function_call_arguments.delta" in stream
    assert "function_call_arguments.done" not in stream
    item = stream[stream.rindex("event: response.output_item.done") :]
    assert '"status": "incomplete"' in item[: item.index("\n\n")]
    assert "event: response.incomplete" in stream


async def test_a_response_that_was_cut_within_a_call_can_be_gone_on_from() -> None:
    api = served(CALLS)
    first = await test_responses.answer(api, tools=test_responses.TOOLS, max_output_tokens=WITHIN_FIRST)
    second = await test_responses.answer(
        api, previous_response_id=first.id, tools=test_responses.TOOLS, max_output_tokens=500
    )
    assert second.status == "completed"


@STREAMS
async def test_a_chat_that_was_cut_ends_with_length(stream: bool) -> None:
    for max_tokens, arguments in ((WITHIN_FIRST, HALF), (AFTER_FIRST, TWO[0][1])):
        if stream:  # the client's helper refuses what was cut
            body = {"model": NAME, "messages": ASK, "tools": TOOLS, "max_tokens": max_tokens, "stream": True}
            chunks = (await served(CALLS).post(CHATS, body)).text
            assert chunks.count('"finish_reason": "length"') == 1
            assert '"finish_reason": "tool_calls"' not in chunks
            continue
        choice, _ = await chat(served(CALLS), stream, tools=TOOLS, max_tokens=max_tokens)
        assert (choice.finish_reason, called(choice.message)) == ("length", [("get_weather", arguments)])


@STREAMS
async def test_a_message_that_was_cut_ends_with_its_limit(stream: bool) -> None:
    for max_tokens in (WITHIN_FIRST, AFTER_FIRST, WITHIN_SECOND):
        message = await test_messages.answer(
            served(CALLS), stream, tools=test_messages.TOOLS, max_tokens=max_tokens
        )
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)


@STREAMS
async def test_a_call_that_the_model_breaks_off_is_no_reason_to_run_tools(stream: bool) -> None:
    text = CALLS[: CALLS.index("rich")]
    choice, _ = await chat(served(text), stream, tools=TOOLS)
    assert (choice.finish_reason, called(choice.message)) == ("stop", [("get_weather", '{"city": "Zü')])
    message = await test_messages.answer(served(text), stream, tools=test_messages.TOOLS)
    assert message.stop_reason == "end_turn"
    response = await test_responses.answer(served(text), stream, tools=test_responses.TOOLS)
    assert response.output[-1].status == "incomplete"

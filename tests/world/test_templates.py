"""Prompts by published chat templates are those that transformers makes of the same conversation, and nothing is lost."""

from typing import Any

import pytest

from core.errors import RequestError
from tests.cluster.ingress.api.templated import ASK, SYSTEM, TOOL, Chat, call, calling, chat_asked, result
from tests.world import published_tokenizers

pytestmark = pytest.mark.slow
WITH_TEMPLATES = ("qwen3", "deepseek_v3", "gemma3", "llama3_1")
ANSWER = {"role": "assistant", "content": "Blue, I think."}
GO_ON = {"role": "user", "content": " And then? 水 "}
LATE = {"role": "system", "content": "Mind the gap."}
THOUGHT = {**ANSWER, "reasoning_content": "They like the sea."}
OBJECT_CALL = {**call("call_a"), "function": {"name": "paint", "arguments": {"shade": "blue", "count": 2}}}


def served(name: str) -> Chat:
    return Chat(published_tokenizers.ours(name))


def ids(chat: Chat, *messages: Any, **body: Any) -> list[int]:
    conversation, _ = chat_asked({"model": "fake", "messages": list(messages), **body})
    return list(chat.format.prompt_of(conversation))


def their_ids(name: str, *messages: Any, **more: Any) -> list[int]:
    return published_tokenizers.theirs(name).apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=False, **more
    )


@pytest.mark.parametrize("name", WITH_TEMPLATES)
@pytest.mark.parametrize("messages", [(ASK,), (SYSTEM, ASK, ANSWER, GO_ON), (ASK, THOUGHT, GO_ON)])
def test_a_chat_has_the_tokens_that_transformers_gives_it(name: str, messages: tuple[Any, ...]) -> None:
    assert ids(served(name), *messages) == their_ids(name, *messages)


@pytest.mark.parametrize("name", WITH_TEMPLATES)
def test_an_answer_that_is_gone_on_with_has_the_tokens_that_transformers_gives_it(name: str) -> None:
    theirs = published_tokenizers.theirs(name)
    wanted = theirs.apply_chat_template([ASK, ANSWER], continue_final_message=True, return_dict=False)
    assert ids(served(name), ASK, ANSWER, continue_final_message=True) == wanted


def test_a_loop_of_tools_has_the_tokens_that_transformers_gives_it() -> None:
    chat, bare = served("qwen3"), {"type": "function", "function": {"name": "stop"}}
    assert chat.formats == ("hermes", "think")
    tools = [TOOL, bare]
    assert ids(chat, SYSTEM, ASK, tools=tools) == their_ids("qwen3", SYSTEM, ASK, tools=tools)
    for text in ("", "I look."):
        sent = ASK, calling(call("call_a"), content=text), result("call_a", "seen")
        theirs = ASK, calling(OBJECT_CALL, content=text), result("call_a", "seen")
        assert ids(chat, *sent, tools=tools) == their_ids("qwen3", *theirs, tools=tools)
        assert ids(chat, *sent) == their_ids("qwen3", *theirs)


@pytest.mark.parametrize("switch", [True, False])
def test_a_templates_own_switch_reaches_it(switch: bool) -> None:
    found = ids(served("qwen3"), ASK, chat_template_kwargs={"enable_thinking": switch})
    assert found == their_ids("qwen3", ASK, enable_thinking=switch)


@pytest.mark.parametrize("name", WITH_TEMPLATES)
@pytest.mark.parametrize(
    "messages", [(ASK, LATE), (SYSTEM, ASK, LATE, GO_ON), (SYSTEM, ASK, ANSWER, LATE, GO_ON)]
)
def test_a_late_system_message_is_in_the_prompt(name: str, messages: tuple[Any, ...]) -> None:
    prompt = served(name).prompt(*messages)
    assert all(message["content"].strip() in prompt for message in messages)
    if name == "gemma3":  # it has no turns of the system
        assert prompt.startswith("<bos><start_of_turn>user\n" + prompt.split("user\n", 1)[1])
        assert "<start_of_turn>system" not in prompt


def test_text_beside_calls_is_in_the_prompt_where_the_template_renders_one_of_them() -> None:
    """DeepSeek-V3's renders calls only of messages whose content is null."""
    said = calling(call("call_a"), call("call_b"), content="I look.")
    prompt = served("deepseek_v3").prompt(ASK, said, result("call_a", "seen"), result("call_b", "done"))
    parts = ["I look.", "<｜tool▁calls▁begin｜>", "paint", '{"shade": "blue", "count": 2}', "seen", "done"]
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("deepseek_v3", "shows the model no tools"), ("gemma3", "shows the model no tools")],
)
def test_a_model_whose_template_shows_no_tools_refuses_them(name: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        served(name).prompt(ASK, tools=[TOOL])

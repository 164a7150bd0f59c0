"""Blocks, tools and threads that Anthropic's clients send in the middle of a conversation."""

from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool

from tests.cluster.ingress.anthropic.test_messages import PATH, client
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.template_fakes import last_rendered, served
from tests.models.seeing_checkpoints import encoded, make_image

WARNING = "x-baton-warning"
TEXT = {"type": "text", "text": "Read it."}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "The sky is blue."}


async def rendered(*messages: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    api = served("x")
    answer = await api.post(PATH, {"model": NAME, "max_tokens": 5, "messages": list(messages), **more})
    assert answer.status_code == 200, answer.text
    return last_rendered(api), answer


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


@pytest.mark.parametrize(
    "source", [PLAIN, {"type": "content", "content": "The sky is blue."}, {"type": "content", "content": [
        {"type": "text", "text": "The sky "}, {"type": "text", "text": "is blue."}]}]
)  # fmt: skip
async def test_a_documents_text_is_shown_with_its_title_and_context(source: Any) -> None:
    document = {
        "type": "document",
        "source": source,
        "title": "Sky",
        "context": "Of 2026",
        "citations": {"enabled": False},
    }
    made, answer = await rendered(user(document, TEXT))
    assert made["messages"][0]["content"] == (
        "<document>\n<title>Sky</title>\n<context>Of 2026</context>\nThe sky is blue.\n</document>\nRead it."
    )
    assert WARNING not in answer.headers


async def test_a_tools_result_may_be_a_document_a_search_result_or_a_tool() -> None:
    found = {
        "type": "search_result",
        "source": "http://a",
        "title": "A",
        "content": [{"type": "text", "text": "b"}],
    }
    reference = {"type": "tool_reference", "tool_name": "get_time"}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    content = [{"type": "document", "source": PLAIN}, found, reference]
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    made, _ = await rendered(user(TEXT), {"role": "assistant", "content": [use]}, user(result))
    assert made["messages"][2]["role"] == "tool"
    assert made["messages"][2]["content"] == (
        "<document>\nThe sky is blue.\n</document>\n"
        "<search_result>\n<title>A</title>\n<source>http://a</source>\nb\n</search_result>\n"
        "The tool get_time is available.\n"
    )


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"type": "document", "source": PDF}, "messages[0].content[0].source: a document's source must be of type 'text'"),
        ({"type": "document", "source": {"type": "url", "url": "http://a/b.pdf"}}, "no PDF"),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, "no upload is read here"),
        ({"type": "document", "source": PLAIN, "citations": {"enabled": True}}, "citations.enabled must be False"),
    ],
)  # fmt: skip
async def test_what_cannot_be_read_or_cited_is_refused_by_name(block: Any, says: str) -> None:
    answer = await served("x").post(PATH, {"model": NAME, "max_tokens": 5, "messages": [user(block)]})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


async def test_a_documents_image_needs_a_model_that_sees() -> None:
    data = encoded(make_image(1, 20, 16))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data.hex()}}
    block = {"type": "document", "source": {"type": "content", "content": [image]}}
    answer = await served("x").post(PATH, {"model": NAME, "max_tokens": 5, "messages": [user(block)]})
    assert answer.status_code == 400
    assert "reads no images" in answer.text


async def test_redacted_thinking_is_left_out_and_said_to_be() -> None:
    blocks = [{"type": "redacted_thinking", "data": "secret"}, {"type": "text", "text": "So."}]
    made, answer = await rendered(user(TEXT), {"role": "assistant", "content": blocks}, user(TEXT))
    assert made["messages"][1] == {"role": "assistant", "content": "So."}
    assert "redacted_thinking" in answer.headers[WARNING]


async def test_examples_of_input_are_part_of_a_tools_description() -> None:
    tool = {
        "name": "f",
        "description": "Does.",
        "input_schema": {"type": "object"},
        "input_examples": [{"city": "Zürich"}],
    }
    made, _ = await rendered(user(TEXT), tools=[tool])
    function = made["tools"][0]["function"]
    assert function["description"] == 'Does.\nExamples of arguments:\n{"city": "Zürich"}'


OWN = {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True, "allowed_callers": ["direct"]}


@pytest.mark.parametrize(
    "kind", ["web_search_20250305", "code_execution_20250825", "bash_20250124", "mcp_toolset"]
)
async def test_a_tool_that_is_not_run_here_is_left_out_unless_it_is_forced(kind: str) -> None:
    tools = [{"type": kind, "name": "theirs"}, OWN]
    made, answer = await rendered(user(TEXT), tools=tools, tool_choice={"type": "auto"})
    assert [tool["function"]["name"] for tool in made["tools"]] == ["f"]
    assert answer.headers[WARNING].startswith(f"tools[0]: a tool of type '{kind}' is not run here")
    body = {"model": NAME, "max_tokens": 5, "messages": [user(TEXT)], "tools": tools}
    forced = await served("x").post(PATH, {**body, "tool_choice": {"type": "tool", "name": "theirs"}})
    assert forced.status_code == 400
    assert "'theirs', which is no tool" in forced.text


async def test_the_sdks_runner_goes_on_without_a_thread() -> None:
    """It asks the server to keep the conversation, and sends all of it where the server says that it cannot."""

    @beta_async_tool
    async def look_up(word: str) -> str:
        """What a word means."""
        return f"{word} is a flower"

    call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "heliotrope"}}\n</tool_call>'
    api = served(call)
    runner = client(api).beta.messages.tool_runner(
        model=NAME,
        max_tokens=200,
        tools=[look_up],
        max_iterations=2,
        messages=[{"role": "user", "content": "What is heliotrope?"}],
    )
    said = [message.stop_reason async for message in runner]
    assert said == ["tool_use", "tool_use"]
    assert last_rendered(api)["messages"][-1]["content"] == "heliotrope is a flower"


async def test_a_refusals_code_stands_where_the_sdk_looks_for_it() -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client(served("x")).beta.messages.create(
            model=NAME, max_tokens=5, messages=[{"role": "user", "content": "x"}], thread={"type": "create"}
        )
    assert refused.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}  # type: ignore[index]

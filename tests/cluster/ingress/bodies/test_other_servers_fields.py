"""Conversations that began on other servers, and tools that only OpenAI runs."""

from typing import Any

import pytest

from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import CHATS
from tests.cluster.ingress.api.template_fakes import ASK, TOOLS, last_rendered, served

RESPONSES = "/v1/responses"
WARNING = "x-baton-warning"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "Hm.", "id": "r", "format": "x", "index": 0}
            ]
        },
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "Hm."}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
        {"reasoning_content": "Hm.", "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]},
    ],
)
async def test_reasoning_of_other_servers_is_the_models_own(fields: dict[str, Any]) -> None:
    api = served("x")
    said = {"role": "assistant", "content": "Yes.", **fields}
    answer = await api.post(CHATS, {"model": NAME, "messages": [*ASK, said, *ASK]})
    assert answer.status_code == 200, answer.text
    assert last_rendered(api)["messages"][1]["reasoning_content"] == "Hm."
    assert WARNING not in answer.headers


@pytest.mark.parametrize(
    "fields",
    [
        {"content": None, "refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
    ],
)
async def test_what_an_assistant_refused_is_what_it_said(fields: dict[str, Any]) -> None:
    api = served("x")
    said = {"role": "assistant", **fields}
    assert (await api.post(CHATS, {"model": NAME, "messages": [*ASK, said, *ASK]})).status_code == 200
    assert last_rendered(api)["messages"][1]["content"] == "I will not."


async def test_another_servers_secrets_are_left_out_and_said_to_be() -> None:
    said = {"role": "assistant", "content": "Yes.", "encrypted_content": "gAAA"}
    answer = await served("x").post(CHATS, {"model": NAME, "messages": [*ASK, said, *ASK]})
    assert answer.status_code == 200
    assert "messages[1].encrypted_content" in answer.headers[WARNING]
    secret = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}
    answer = await served("x").post(RESPONSES, {"model": NAME, "input": [*ASK, secret, *ASK]})
    assert answer.status_code == 200
    assert "encrypted_content" in answer.headers[WARNING]


async def test_what_libraries_keep_at_a_call_is_taken() -> None:
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_time", "arguments": "{}"},
        "extra_content": {"g": 1},
    }
    said = {"role": "assistant", "content": None, "tool_calls": [call], "annotations": []}
    told = {"role": "tool", "tool_call_id": "c", "content": "now"}
    answer = await served("x").post(CHATS, {"model": NAME, "messages": [*ASK, said, told], "tools": TOOLS})
    assert (answer.status_code, answer.headers.get(WARNING)) == (200, None), answer.text


KINDS = ["web_search", "web_search_preview", "web_search_preview_2025_03_11", "file_search", "code_interpreter", "mcp",
         "computer_use_preview", "image_generation", "local_shell", "shell", "apply_patch", "custom", "tool_search"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tool_that_only_openai_runs_is_left_out_with_a_warning(kind: str) -> None:
    own = {"type": "function", "name": "f"}
    api = served("x")
    answer = await api.post(
        RESPONSES, {"model": NAME, "input": "x", "tools": [own, {"type": kind, "name": "t", "any": 1}]}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers[WARNING].startswith(f"tools[1]: a tool of type '{kind}' is not run here")
    assert [tool["function"]["name"] for tool in last_rendered(api)["tools"]] == ["f"]
    assert [tool["name"] for tool in answer.json()["tools"]] == ["f"]
    chat = await api.post(CHATS, {"model": NAME, "messages": ASK, "tools": [{"type": kind}]})
    assert chat.status_code == 200, chat.text
    assert chat.headers[WARNING].startswith("tools[0]")


@pytest.mark.parametrize(
    ("choice", "status"),
    [
        ({"type": "web_search"}, 400),
        ({"type": "custom", "name": "t"}, 400),
        ("required", 400),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, 400),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, 200),
        ("auto", 200),
        ("none", 200),
    ],
)
async def test_it_is_refused_only_where_the_choice_forces_it(choice: Any, status: int) -> None:
    body = {"model": NAME, "input": "x", "tools": [{"type": "web_search"}], "tool_choice": choice}
    answer = await served("x").post(RESPONSES, body)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert answer.json()["error"]["param"] == "tool_choice"


async def test_what_an_answer_may_include_is_openais_list() -> None:
    included = [
        "web_search_call.action.sources",
        "reasoning.encrypted_content",
        "code_interpreter_call.outputs",
    ]
    answer = await served("x").post(RESPONSES, {"model": NAME, "input": "x", "include": included})
    assert answer.status_code == 200, answer.text

"""What bodies may look like before any field is read: nesting and numbers that nothing behind the API could take."""

from typing import Any

import pytest

from cluster.ingress.http.request_json import parse_json
from core.errors import RequestError
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, COMPLETIONS, OK, Api
from tests.cluster.ingress.api.template_fakes import served

PATHS = {
    CHATS: lambda schema: CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
    "/v1/messages": lambda schema: CHAT | {"max_tokens": 3, "tools": [{"name": "f", "input_schema": schema}]},
    "/v1/responses": lambda schema: {
        "model": NAME,
        "input": "x",
        "tools": [{"type": "function", "name": "f", "parameters": schema}],
    },
}  # fmt: skip


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("depth", [130, 300, 600, 5000])
async def test_a_tool_that_is_nested_too_deeply_is_refused(path: str, depth: int) -> None:
    text = '{"a": ' * depth + "1" + "}" * depth
    body = str(PATHS[path]({"type": "object", "x": "HERE"})).replace("'HERE'", text).replace("'", '"')
    answer = await served("x").post(path, body.encode())
    assert answer.status_code == 400, answer.text
    assert "nested too deeply" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_tool_that_is_nested_deeply_is_served(path: str) -> None:
    answer = await served("x").post(path, PATHS[path](nested(100)))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", PATHS)
async def test_a_number_beyond_all_bounds_is_refused_wherever_it_stands(path: str) -> None:
    body = str(PATHS[path]({"maximum": "HERE"})).replace("'HERE'", "1e999").replace("'", '"')
    answer = await served("x").post(path, body.encode())
    assert answer.status_code == 400, answer.text
    assert "1e999" in answer.json()["error"]["message"]


def test_many_brackets_are_no_nesting() -> None:
    assert len(parse_json(b'{"p": [' + b"[1]," * 1000 + b"[1]]}")["p"]) == 1001
    with pytest.raises(RequestError, match="128 levels"):
        parse_json(b'{"p": ' + b"[" * 128 + b"]" * 128 + b"}")
    assert parse_json(b'{"p": ' + b"[" * 127 + b"]" * 127 + b"}")


async def test_top_k_beyond_the_vocabulary_is_all_of_it() -> None:
    api = Api(FakeGenerator())
    assert (await api.post(COMPLETIONS, OK | {"top_k": 2**70})).status_code == 200
    assert api.generator.requests[0].sampling.top_k == 257


async def test_a_template_gets_no_argument_that_python_would_take() -> None:
    answer = await Api(FakeGenerator()).post(CHATS, CHAT | {"chat_template_kwargs": {"self": 1}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"

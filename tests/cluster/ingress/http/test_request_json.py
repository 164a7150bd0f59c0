"""What bodies may look like before any field is read: nesting and numbers that nothing behind the API could take."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    "number",
    ["1e309", "-1E+400", "1e0999", "9" * 309 + ".5", "9" * 215 + "e99", "0.001e+312", "1" * 300 + "E10"],
)
def test_every_spelling_of_a_number_beyond_all_bounds_is_refused(number: str) -> None:
    with pytest.raises(RequestError, match="the number .* is too large") as refused:
        parse_json(f'{{"text": "1e3, 1.2.3e400", "far": [{"1, " * 100_000}{{"x": {number}}}]}}'.encode())
    assert refused.value.field == "far"


@pytest.mark.parametrize("number", ["1e308", "1e-999", "9" * 400, "1e00", "0e999", "0.0e+999"])
def test_a_number_that_is_finite_is_taken(number: str) -> None:
    assert parse_json(f'{{"x": [{number}], "text": "1e999"}}'.encode()) == {
        "x": json.loads(f"[{number}]"),
        "text": "1e999",
    }


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf  ", "is empty"),
        (b"[1]", "must be a JSON object, not list"),
        (b'{"a": NaN}', "not JSON: expected value at line 1 column 7"),
        (b'{"a": -Infinity}', "not JSON"),
        (b'{"a": 1,}', "trailing comma"),
        (b"{'a': 1}", "key must be a string"),
        (b'{"a": "\n"}', "control character"),
        (b'{"a": "\xff"}', r"not UTF-8 at line 1 column 8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "half a character"),
        (b'{"a": "\\udc00x"}', "half a character"),
        (b'{"a": "\\ud800\\ud800"}', "half a character"),
        (b'{"a": 1} {}', "trailing characters"),
        (b'{"a": 1', "EOF"),
        (b"[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_json_is_refused_with_the_place(body: bytes, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        parse_json(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_every_body_is_what_python_makes_of_it(value: dict[str, Any], ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode()
    assert parse_json(body) == json.loads(body) == value


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

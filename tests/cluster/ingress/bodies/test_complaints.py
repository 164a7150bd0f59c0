"""How a refusal says which place in a request's body is wrong."""

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.ingress.bodies.body_model import validate
from cluster.ingress.openai.request_bodies import ChatRequest, CompletionRequest
from core.errors import RequestError
from tests.cluster.ingress.api.harness import CHAT, OK


def test_a_refusal_names_the_whole_path() -> None:
    def message(body: Any) -> str:
        with pytest.raises(RequestError) as refused:
            validate(ChatRequest, {**CHAT, **body})
        return refused.value.message

    def shows(parts: list[Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": parts}]}

    parts: list[Any] = [{"type": "image_url", "image_url": "x"}]
    assert message(shows(parts)) == "messages[0].content[0].image_url must be an object, not 'x'"
    parts = [{"type": "image_url", "image_url": {}}]
    assert message(shows(parts)) == "messages[0].content[0].image_url.url is required"
    assert message(shows([{"type": "text"}])) == "messages[0].content[0].text is required"
    assert message({"tools": [{"type": "function", "function": {}}]}) == (
        "tools[0].function.name is required"
    )
    assert message({"stream_options": {"include_usage": 1}}) == (
        "stream_options.include_usage must be true or false, not 1"
    )
    calls = [{"role": "assistant", "content": "", "tool_calls": [{}]}]
    assert message({"messages": calls}) == "messages[0].tool_calls[0].id is required"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": "8"}, "max_tokens must be an integer, not '8'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"temperature": 3}, "temperature must be at most 2, not 3"),
        ({"temperature": "x" * 100}, f"temperature must be a number, not '{'x' * 40}…'"),
        ({"top_p": 0}, "top_p must be more than 0, not 0"),
        ({"seed": 2**63}, f"seed must be less than {2**63}, not {2**63}"),
        ({"stop": ["a"] * 65}, "stop must have at most 64 items, not 65"),
        ({"stop": [""]}, "stop[0] must have at least 1 character, not 0"),
        ({"messages": []}, "messages must have at least 1 item, not 0"),
        ({"messages": [{"role": "user"}]}, "messages[0]: content is required"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
         "messages[0].content[0].type must be one of 'text', 'image_url', not 'input_audio'"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type is required"),
        ({"tools": [{"type": "fucntion", "function": {"name": "f"}}]}, "tools[0].type must be 'function', not 'fucntion'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
         "response_format.json_schema.schema is required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": None}}},
         "response_format.json_schema.schema must be an object, not null"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function is required"),
        ({"tool_choice": "any"}, "tool_choice must be 'none', 'auto' or 'required', not 'any'"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice.allowed_tools.tools must have at least 1 item, not 0"),
        ({"response_format": {"type": "xml"}},
         "response_format.type must be one of 'text', 'json_object', 'json_schema', not 'xml'"),
        ({"logit_bias": {"5": None}}, "logit_bias.5 must be a number, not null"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_may_stand_there_and_what_does(body: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        validate(ChatRequest, {**CHAT, **body})
    assert refused.value.message == said
    assert refused.value.field == next(iter(body))


@pytest.mark.parametrize(
    "body",
    [{"prompt": [-1] * 1000}, {"prompt": [1] * 1000 + [-1]}, {**OK, "stop_token_ids": [-1] * 1000}],
)
def test_a_long_list_gives_no_long_list_of_complaints(body: Any) -> None:
    """A million of them would hold the event loop for seconds."""
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({**OK, **body})
    assert refused.value.error_count() <= 4

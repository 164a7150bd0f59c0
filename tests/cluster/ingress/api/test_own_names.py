"""Each API validates its own bodies, once, and complains of them in their own words, also where the complaint is not its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cluster.ingress.openai.request_bodies import ChatRequest, CompletionRequest
from models.files.hub import resolve
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import served
from tests.cluster.ingress.api.templated import tokenizer_with
from tests.cluster.ingress.images.test_images import seeing

MESSAGES, RESPONSES, INFILL = "/v1/messages", "/v1/responses", "/infill"
USER = {"role": "user", "content": "x"}
SHOWN = {"type": "image", "source": {"type": "url", "url": "http://x"}}
SEEN = {"type": "input_image", "image_url": "http://x"}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [SHOWN]}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": [SEEN]}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": ""}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
NAMESPACES = [
    {
        "type": "namespace",
        "name": f"n{n}",
        "tools": [{"type": "function", "name": f"f{m}"} for m in range(300)],
    }
    for n in range(2)
]
LONG = [{"type": "namespace", "name": "n" * 90, "tools": [{"type": "function", "name": "f" * 90}]}]
SYSTEMLESS = "{% for m in messages if m.role in ('user', 'tool') %}{{ m.content }}{% endfor %}"


def required(path: str) -> dict[str, Any]:
    asked = {"messages": [USER]}
    own = {MESSAGES: {"max_tokens": 5, **asked}, MESSAGES + "/count_tokens": asked, RESPONSES: {"input": "x"}}
    return {"model": NAME, **own.get(path, {})}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (MESSAGES, {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, SHOWN]}]},
         "messages[1].content[1]: "),
        (MESSAGES, {"system": "s", "messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0]: "),
        (MESSAGES, {"messages": [USER, {"role": "assistant", "content": [USE] * 513}]},
         "messages[1]: 513 calls exceed the limit of 512"),
        (MESSAGES, {"messages": [USER, {"role": "assistant", "content": " "}]}, "messages[1]: the last message must"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format: "),
        (RESPONSES, {"input": [USER, {"role": "user", "content": [{"type": "input_text", "text": "a"}, SEEN]}]},
         "input[1].content[1].image_url: "),
        (RESPONSES, {"instructions": "s", "input": [USER, CALL, OUTPUT]}, "input[2].output[0].image_url: "),
        (RESPONSES, {"input": [USER, {"role": "system", "content": [SEEN]}]}, "input[1]: only a user's message"),
        (RESPONSES, {"input": [USER, *[CALL] * 513]}, "input[1]: 513 calls exceed the limit of 512"),
        (RESPONSES, {"input": "x" * 9000}, "the prompt is too long"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n n", "schema": {}}}}, "text.format.name: "),
        (RESPONSES, {"tools": NAMESPACES}, "tools: 600 functions exceed the limit of 512"),
        (RESPONSES, {"tools": LONG}, "has more than 128 characters"),
        (RESPONSES, {"top_k": "x"}, "top_k must be an integer, not 'x'"),
        (RESPONSES, {"stop": [""]}, "stop[0] must have at least 1 character, not 0"),
        (RESPONSES, {"seed": 2**70}, "seed must be less than"),
        (RESPONSES, {"prompt_cache_key": 3}, "prompt_cache_key must be a string, not 3"),
        (RESPONSES, {"prompt_cache_retention": "7d"}, "prompt_cache_retention must be 'in_memory', '24h' or 'none'"),
        (RESPONSES, {"chat_template_kwargs": 3}, "chat_template_kwargs must be an object, not 3"),
        (INFILL, {"repeat_penalty": 99}, "repeat_penalty must be at most 10, not 99"),
        (INFILL, {"temperature": 9}, "temperature must be at most 2, not 9"),
        (INFILL, {"cache_hints": {"pin": 1}}, "cache_hints.pin must be true or false, not 1"),
    ],
)  # fmt: skip
async def test_a_complaint_names_the_clients_own_field(path: str, body: dict[str, Any], says: str) -> None:
    refused = await served("x").post(path, {**required(path), **body})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert says in error["message"]
    if path != MESSAGES:
        assert error["param"].partition(".")[0] in body


async def test_an_image_that_cannot_be_read_is_named_as_the_client_wrote_it() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    ]
    refused = await seeing().post(
        RESPONSES, {"model": NAME, "input": [USER, {"role": "user", "content": parts}]}
    )
    error = refused.json()["error"]
    assert error["message"].startswith("input[1].content[1].image_url: the image cannot be read")
    assert error["param"] == "input"


async def test_a_message_that_would_be_lost_is_named_as_the_client_wrote_it(tmp_path: Path) -> None:
    settings = replace(SETTINGS, vocab_size=4096, tokenizer_folder=resolve("embedded"))
    api = Api(FakeGenerator(), settings, tokenizer=tokenizer_with(SYSTEMLESS, tmp_path / "t"))  # type: ignore[arg-type]
    answered = [USER, {"role": "assistant", "content": "y"}, USER]
    for path, body, place in (
        (MESSAGES, {"system": "s", "messages": answered}, "system"),
        (MESSAGES, {"messages": answered}, "messages[1]"),
        (RESPONSES, {"instructions": "s", "input": answered}, "instructions"),
        (RESPONSES, {"input": answered}, "input[1]"),
    ):
        refused = await api.post(path, {**required(path), **body})
        assert refused.json()["error"]["message"].startswith(
            f"{place}: this model's chat template would leave out"
        )


@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "/count_tokens", RESPONSES])
async def test_no_other_apis_body_is_read_as_one_of_openais(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("this is OpenAI's body")

    for kind in (ChatRequest, CompletionRequest):
        monkeypatch.setattr(kind, "model_validate", refuse)
    assert (await served("x").post(path, required(path))).status_code == 200

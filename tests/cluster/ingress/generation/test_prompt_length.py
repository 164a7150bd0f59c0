"""Texts that are far too long, which are refused before all of them is made tokens."""

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from models.pooling.pooling import Pooling
from tests.cluster.ingress.api.fakes import NAME, ByteTokenizer, FakeGenerator
from tests.cluster.ingress.api.harness import CHATS, COMPLETIONS, OK, SETTINGS, Api, message_of

LONG = "x" * 1_000_000
CONTEXT = SETTINGS.max_context_tokens


class Counting(ByteTokenizer):
    """Counts what it is given. A run of spaces is one token, as it is in many vocabularies."""

    def __init__(self) -> None:
        super().__init__()
        self.num_characters = 0
        self.added_tokens = dict.fromkeys(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), 257)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_characters += len(text)
        return super().encode(" ".join(text.split()) if text.strip() else text[:1])


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    made = Api(FakeGenerator("hello"), tokenizer=Counting())
    yield made
    await made.http.aclose()


async def refused(api: Api, path: str, body: dict[str, Any]) -> tuple[str, int]:
    """Return the field that is named, and how many characters were tokenised."""
    assert isinstance(api.tokenizer, Counting)
    api.tokenizer.num_characters = 0
    answer = await api.post(path, {"model": NAME, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    return error["param"], api.tokenizer.num_characters


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", LONG]}, "prompt"),
        (COMPLETIONS, {"prompt": " " * 100 * CONTEXT + LONG}, "prompt"),
        (COMPLETIONS, {"prompt": LONG, "suffix": "x"}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "suffix": LONG}, "suffix"),
        (CHATS, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
async def test_a_text_is_read_until_it_is_known_to_be_too_long(
    api: Api, path: str, body: dict[str, Any], field: str
) -> None:
    named, num_characters = await refused(api, path, body)
    assert named == field
    assert num_characters < len(LONG) / 10


@pytest.mark.parametrize("text", ["x" * CONTEXT, LONG])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/messages", lambda text: {"max_tokens": 9, "messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", lambda text: {"input": text, "max_output_tokens": 9}),
        ("/api/chat", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/api/generate", lambda text: {"prompt": text}),
        ("/api/generate", lambda text: {"prompt": text, "raw": True}),
    ],
)
async def test_the_refusal_has_the_words_by_which_agents_know_to_shorten(
    api: Api, path: str, body: Any, text: str
) -> None:
    answer = await api.post(path, {"model": NAME, **body(text)})
    message = message_of(answer.json()["error"])
    assert (answer.status_code, "maximum context length is 200 tokens" in message) == (400, True)
    found = re.search(r"prompt is too long[^0-9]*(\d+) tokens > (\d+) maximum", message)
    assert found
    assert int(found[1]) > int(found[2])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
async def test_so_is_a_text_to_embed(path: str) -> None:
    settings = replace(SETTINGS, pooling=Pooling(kind="mean"))
    api = Api(FakeGenerator("hello"), settings, tokenizer=Counting())
    body = {"input": ["x", LONG]} if "embed" in path else {"query": "x", "documents": [LONG]}
    assert (await refused(api, path, body))[1] < len(LONG) / 10
    await api.http.aclose()


async def test_a_long_text_of_few_tokens_is_answered(api: Api) -> None:
    answer = await api.post(COMPLETIONS, {**OK, "prompt": "x" + " " * 100 * CONTEXT + "y"})
    assert answer.status_code == 200
    assert api.generator.requests[0].prompt == tuple(b"x y")


async def test_a_text_is_refused_at_the_same_length_as_before(api: Api) -> None:
    for length in (CONTEXT - 10, CONTEXT, 8 * CONTEXT, 8 * CONTEXT + 1):
        answer = await api.post(COMPLETIONS, {**OK, "prompt": "x" * length, "max_tokens": 10})
        assert answer.status_code == (200 if length <= CONTEXT - 10 else 400)


@pytest.mark.parametrize(
    ("path", "text"),
    [(COMPLETIONS, {"prompt": LONG}), (CHATS, {"messages": [{"role": "user", "content": LONG}]})],
)
async def test_a_text_that_is_to_be_cut_is_as_long_as_it_likes(
    api: Api, path: str, text: dict[str, Any]
) -> None:
    answer = await api.post(path, {"model": NAME, **text, "truncate_prompt_tokens": 50})
    assert answer.status_code == 200
    assert len(api.generator.requests[0].prompt) == 50


async def test_tokens_of_any_text_are_counted(api: Api) -> None:
    """A client learns from it that a conversation must be made shorter."""
    said = {"messages": [{"role": "user", "content": LONG}]}
    prompt = f"user: {LONG}\nassistant: "
    assert (await api.post("/tokenize", {"prompt": LONG})).json()["count"] == len(LONG)
    assert (await api.post("/tokenize", said)).json()["count"] == len(prompt) - 1
    for path, body in (
        ("/v1/messages/count_tokens", said),
        ("/v1/responses/input_tokens", {"input": LONG}),
    ):
        answer = await api.post(path, {"model": NAME, **body})
        assert answer.json()["input_tokens"] == len(prompt) - 1, answer.text

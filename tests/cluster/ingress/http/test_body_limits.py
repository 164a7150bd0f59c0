"""What a body may cost before it is known whether it is served: values, texts and their tokens."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from cluster.ingress.tenants.access import Rules, TenantRules
from cluster.ingress.tenants.use_limits import UseLimits
from models.pooling.pooling import Pooling
from tests.cluster.ingress.api.fakes import NAME, ByteTokenizer, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, CLASSES, COMPLETIONS, OK, SETTINGS, Api
from tests.cluster.ingress.http.test_disconnect import http_post, serving
from tests.patience import PATIENCE_S, until

EMBEDS = replace(SETTINGS, pooling=Pooling(kind="mean"))


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    made = Api(FakeGenerator("hello"))
    yield made
    await made.http.aclose()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["x"] * 129},
        {"prompt": ["x"] * 100_000},
        {"prompt": [[1]] * 60_000},
        {"prompt": ["x"] * 65, "n": 2},
        {"prompt": ["x"] * 65, "suffix": "y", "n": 2},
    ],
)
async def test_too_many_prompts_are_refused_before_any_is_made_tokens(api: Api, body: dict[str, Any]) -> None:
    answer = await api.post(COMPLETIONS, {"model": NAME, **body})
    assert answer.status_code == 400
    assert "exceed the limit of 128" in answer.json()["error"]["message"]
    assert not api.tokenizer.encoded_on


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["x"] * 100_000}),
        ("/v1/embeddings", {"input": [[1]] * 2049}),
        ("/v1/score", {"text_1": ["x"] * 100_000, "text_2": "y"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"] * 100_000}),
    ],
)
async def test_so_are_too_many_texts_to_embed(path: str, body: dict[str, Any]) -> None:
    api = Api(FakeGenerator("hello"), EMBEDS)
    answer = await api.post(path, {"model": NAME, **body})
    assert answer.status_code == 400, answer.text
    assert not api.tokenizer.encoded_on
    await api.http.aclose()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"prompt": ["x"] * 260_000}, "131072 strings and keys"),
        ({"prompt": [[]] * 70_000}, "65536 lists and objects"),
        ({"prompt": [1] * 660_000}, "655360 values"),
        (
            {"prompt": "x", "chat_template_kwargs": {str(n): 1 for n in range(140_000)}},
            "131072 strings and keys",
        ),
        ({"prompt": ['"[{,' * 9] * 140_000}, "131072 strings and keys"),
        ({"prompt": ["\\"] * 140_000}, "131072 strings and keys"),
    ],
)
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    api: Api, body: dict[str, Any], what: str
) -> None:
    answer = await api.post(COMPLETIONS, {"model": NAME, **body})
    assert answer.status_code == 400
    assert f"more than {what}" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([1] * 50_000 + [-1], "prompt[50000] must be at least 0, not -1"),
        ([1] * 16_384 + ["a"] + [1] * 99, "prompt[16384] must be an integer, not 'a'"),
        ([[1] * 20_000, [1] * 30_000 + [2.5]], "prompt[1][30000] must be an integer, not 2.5"),
    ],
)
async def test_a_wrong_token_is_named_however_far_it_is(api: Api, prompt: list[Any], why: str) -> None:
    answer = await api.post(COMPLETIONS, {"model": NAME, "prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert answer.json()["error"]["message"] == why


@pytest.mark.parametrize("text", ['"[{,' * 300_000, "\\" * 300_000, '\\"' * 300_000, "[" * 300_000])
async def test_what_stands_in_a_text_is_not_counted(api: Api, text: str) -> None:
    answer = await api.post(COMPLETIONS, {**OK, "prompt": text, "truncate_prompt_tokens": 5})
    assert answer.status_code == 200, answer.text


async def test_words_that_an_answer_may_not_have_are_made_tokens_once(api: Api) -> None:
    num_encoded: list[int] = []
    for num_prompts in (1, 100):
        api.tokenizer.encoded_on.clear()
        body = {**OK, "prompt": ["x"] * num_prompts, "bad_words": ["a", "b"], "max_tokens": 1}
        assert (await api.post(COMPLETIONS, body)).status_code == 200
        num_encoded.append(len(api.tokenizer.encoded_on))
    assert num_encoded[1] - num_encoded[0] == 99


COUNTING = [
    ("/tokenize", {"prompt": "x" * 50}, 50),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 50}]}, 68),
    ("/v1/messages/count_tokens", {**CHAT, "messages": [{"role": "user", "content": "x" * 50}]}, 68),
    ("/v1/responses/input_tokens", {"model": NAME, "input": "x" * 50}, 68),
    ("/detokenize", {"tokens": [65] * 50}, 50),
]


@pytest.mark.parametrize(("path", "body", "num_tokens"), COUNTING)
async def test_a_tenant_pays_for_the_tokens_that_it_has_counted(
    path: str, body: dict[str, Any], num_tokens: int
) -> None:
    limits = UseLimits(tokens_per_min=100)
    rules = Rules(CLASSES, {"acme": TenantRules((SecretStr("k"),), limits=limits)})
    api = Api(FakeGenerator(), rules=rules, now=lambda: 0.0)
    key = {"authorization": "Bearer k"}
    answer = await api.post(path, body, **key)
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - num_tokens), answer.text
    assert (await api.post(path, body, **key)).status_code == 200
    third = await api.post(path, body, **key)
    assert (third.status_code, third.json()["error"]["type"]) == (429, "rate_limit_error"), third.text
    await api.http.aclose()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", lambda text: {"prompt": text}),
        ("/tokenize", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/messages/count_tokens", lambda text: {**CHAT, "messages": [{"role": "user", "content": text}]}),
        ("/v1/responses/input_tokens", lambda text: {"model": NAME, "input": text}),
    ],
)
async def test_a_text_that_is_longer_than_any_prompt_is_not_counted(api: Api, path: str, body: Any) -> None:
    answer = await api.post(path, body("x" * (1 << 21)))
    assert answer.status_code == 400, answer.text
    assert "no more than 1048576 are counted" in answer.json()["error"]["message"]
    assert not api.tokenizer.encoded_on


class SlowTokenizer(ByteTokenizer):
    """Holds its thread at the second text until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text and len(self.encoded_on) == 2:
            assert self.free.wait(PATIENCE_S)
        return super().encode(text)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
async def test_a_client_that_leaves_ends_the_making_of_tokens(path: str) -> None:
    slow = SlowTokenizer()
    async with serving(FakeGenerator(), EMBEDS, slow) as (_, port):
        field = "prompt" if path == COMPLETIONS else "input"
        body = json.dumps({"model": NAME, field: ["x" * 100] * 100}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_post(path, body))
        await until(lambda: len(slow.encoded_on) == 2)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        slow.free.set()
        await asyncio.sleep(0.1)
    assert len(slow.encoded_on) <= 3


async def test_long_bodies_of_one_tenant_do_not_hold_anothers_up() -> None:
    rules = Rules(CLASSES, {name: TenantRules((SecretStr(name),)) for name in ("hostile", "other")})
    slow = SlowTokenizer()
    api = Api(FakeGenerator(), rules=rules, tokenizer=slow)
    long = {**OK, "prompt": ["x" * 1000] * 100}
    held = [
        asyncio.create_task(api.post(COMPLETIONS, long, authorization="Bearer hostile")) for _ in range(7)
    ]
    await until(lambda: len(slow.encoded_on) == 2)
    text = "\n" + "y" * 100
    said = {**CHAT, "messages": [{"role": "user", "content": text}], "metadata": {"x": "x" * 8000}}
    async with asyncio.timeout(PATIENCE_S):
        slow.encoded_on.append(threading.current_thread())
        assert (await api.post(CHATS, said, authorization="Bearer other")).status_code == 200
    slow.free.set()
    await asyncio.gather(*held)
    await api.http.aclose()

"""A tokenizer may know tokens that the model has no row for. Every route refuses them, by name, before an instance sees them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.ingress.generation.request_params import ApiSettings
from models.pooling.pooling import Pooling
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import CHATS, COMPLETIONS, SETTINGS, Api, message_of
from tests.cluster.ingress.api.template_fakes import HERMES, TemplateTokenizer, TokenGenerator

SPECIAL = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<think>", "</think>", "[PAD]")
PAD = 305
KNOWS_ALL_BUT_PAD = replace(SETTINGS, vocab_size=PAD, max_context_tokens=4000)
BAD = "an [PAD] in a text"


def served(settings: ApiSettings = KNOWS_ALL_BUT_PAD, template: str = HERMES, ending: str = "") -> Api:
    tokenizer = TemplateTokenizer(template, SPECIAL, ending)
    tokenizer.added_tokens = tokenizer.special_tokens
    return Api(TokenGenerator("Yes.", tokenizer), settings, tokenizer=tokenizer)


def said(text: str, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


PREFILLED = [*said("Go on."), *said(BAD, "assistant")]
GENERATING: Sequence[tuple[str, dict[str, Any], str]] = (
    (CHATS, {"messages": said(BAD)}, "messages"),
    (CHATS, {"messages": [*said("Hi"), *said(BAD, "assistant"), *said("Hi")]}, "messages"),
    (CHATS, {"messages": said(BAD, "system") + said("Hi"), "stream": True}, "messages"),
    (CHATS, {"messages": PREFILLED, "continue_final_message": True}, "messages"),
    (CHATS, {"messages": said(BAD), "n": 2, "use_beam_search": True}, "messages"),
    (COMPLETIONS, {"prompt": BAD}, "prompt"),
    (COMPLETIONS, {"prompt": ["good", BAD], "echo": True}, "prompt"),
    (COMPLETIONS, {"prompt": [1, 2, PAD]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1, 2], [PAD]], "stream": True}, "prompt"),
    (COMPLETIONS, {"prompt": BAD, "n": 2, "use_beam_search": True}, "prompt"),
    (COMPLETIONS, {"prompt": BAD, "suffix": "y"}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "suffix": BAD}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "bad_words": ["[PAD]"]}, "bad_words"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [PAD]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5, PAD]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {str(PAD): 1.0}}, "logit_bias"),
)
EMBEDDING: Sequence[tuple[str, dict[str, Any], str]] = (
    ("/v1/embeddings", {"input": BAD}, "input"),
    ("/v1/embeddings", {"input": ["good", BAD]}, "input"),
    ("/v1/embeddings", {"input": [[1], [PAD]]}, "input"),
)
COMPARING: Sequence[tuple[str, dict[str, Any], str]] = (
    ("/v1/score", {"text_1": "x", "text_2": ["good", BAD]}, "text_2"),
    ("/v1/rerank", {"query": BAD, "documents": ["good"]}, "documents"),
)


@pytest.mark.parametrize(("path", "body", "field"), GENERATING)
async def test_a_token_without_a_row_is_refused_by_name(path: str, body: dict[str, Any], field: str) -> None:
    await refused(served(), path, body, field)


@pytest.mark.parametrize(("path", "body", "field"), [*EMBEDDING, *COMPARING])
async def test_a_text_with_such_a_token_has_no_vector(path: str, body: dict[str, Any], field: str) -> None:
    embeds = replace(KNOWS_ALL_BUT_PAD, pooling=Pooling(kind="last"))
    await refused(served(embeds), path, body, field)


@pytest.mark.parametrize(("path", "body", "field"), COMPARING)
async def test_a_pair_with_such_a_token_has_no_score(path: str, body: dict[str, Any], field: str) -> None:
    scores = replace(KNOWS_ALL_BUT_PAD, pooling=Pooling(kind="last", scores=True))
    await refused(served(scores), path, body, field)


async def refused(api: Api, path: str, body: dict[str, Any], field: str) -> None:
    answer = await api.post(path, {"model": NAME, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert f"'[PAD]' (id {PAD}) is outside the vocabulary of {PAD}" in error["message"]
    assert not api.generator.requests
    await api.http.aclose()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": said(BAD), "max_tokens": 5}),
        ("/v1/messages", {"messages": said("x"), "system": BAD, "max_tokens": 5}),
        ("/v1/responses", {"input": BAD}),
        ("/v1/responses", {"input": "x", "instructions": BAD}),
        ("/api/chat", {"messages": said(BAD)}),
        ("/api/generate", {"prompt": "x", "system": BAD}),
        ("/api/generate", {"prompt": BAD, "raw": True}),
        ("/api/generate", {"prompt": "x", "context": [PAD]}),
    ],
)
async def test_other_vendors_routes_refuse_it_alike(path: str, body: dict[str, Any]) -> None:
    api = served()
    answer = await api.post(path, {"model": NAME, **body})
    assert answer.status_code == 400, answer.text
    assert "'[PAD]'" in message_of(answer.json()["error"])
    assert not api.generator.requests
    await api.http.aclose()


async def test_a_template_that_writes_such_a_token_is_refused_too() -> None:
    await refused(served(ending="[PAD]"), CHATS, {"messages": said("x")}, "messages")


async def test_an_id_that_the_tokenizer_lacks_as_well_is_refused_by_number() -> None:
    api = served()
    for token in (PAD + 1, 2**31, 2**70):
        answer = await api.post(COMPLETIONS, {"model": NAME, "prompt": [token]})
        assert answer.status_code == 400
        assert f"token id {token} is outside the vocabulary of {PAD}" in answer.json()["error"]["message"]
    await api.http.aclose()


async def test_a_prompt_that_is_cut_before_such_a_token_is_answered() -> None:
    api = served()
    body = {"model": NAME, "prompt": [PAD, 65, 66], "truncate_prompt_tokens": 2}
    assert (await api.post(COMPLETIONS, body)).status_code == 200
    assert api.generator.requests[0].prompt == (65, 66)
    await api.http.aclose()


async def test_an_end_of_thinking_without_a_row_is_refused_as_a_budget() -> None:
    api = served(replace(KNOWS_ALL_BUT_PAD, vocab_size=304), template="<think></think>")
    body = {"model": NAME, "messages": said("x"), "thinking_token_budget": 3}
    answer = await api.post(CHATS, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_token_budget"
    assert "'</think>' (id 304)" in answer.json()["error"]["message"]
    await api.http.aclose()

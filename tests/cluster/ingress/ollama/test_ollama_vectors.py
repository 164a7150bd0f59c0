"""/api/embed and /api/embeddings beside /v1/embeddings."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.pooling.pooling import Pooling
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.ollama.ollama_answers import refusal
from tests.cluster.ingress.openai.test_embeddings import VectorGenerator

EMBED, OLD, OPENAI = "/api/embed", "/api/embeddings", "/v1/embeddings"


def embedding(**pooling: Any) -> Api:
    kind = Pooling(kind="last", **pooling)
    return Api(VectorGenerator(), replace(SETTINGS, pooling=kind, embedding_size=4, max_context_tokens=20))


async def vectors(api: Api, texts: Any, **body: Any) -> np.ndarray:
    got = await api.post(EMBED, {"model": NAME, "input": texts, **body})
    assert got.status_code == 200, got.text
    return np.array(got.json()["embeddings"])


async def plain(api: Api, texts: list[str]) -> np.ndarray:
    """The same texts' vectors as OpenAI's clients get them."""
    data = (await api.post(OPENAI, {"model": NAME, "input": texts})).json()["data"]
    return np.array([one["embedding"] for one in data])


def at_length_one(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


async def test_vectors_are_openais_at_the_length_one() -> None:
    api, texts = embedding(normalise=False), ["ab", "cde"]
    expected = await plain(api, texts)
    np.testing.assert_allclose(await vectors(api, texts), at_length_one(expected), rtol=1e-5)
    np.testing.assert_allclose(await vectors(api, "ab"), at_length_one(expected[:1]), rtol=1e-5)
    cut = await vectors(api, texts, dimensions=2)
    np.testing.assert_allclose(cut, at_length_one(expected[:, :2]), rtol=1e-5)
    assert "dimensions: this model's vectors have 4" in await refusal(api, EMBED, input="a", dimensions=5)


async def test_one_vector_is_as_the_model_makes_it() -> None:
    api = embedding(normalise=False)
    got = (await api.post(OLD, {"model": NAME, "prompt": "ab"})).json()
    np.testing.assert_allclose(got["embedding"], (await plain(api, ["ab"]))[0], rtol=1e-5)


async def test_counts_and_durations_are_said() -> None:
    got = (await embedding().post(EMBED, {"model": NAME, "input": ["ab", "cde"]})).json()
    assert (got["model"], got["prompt_eval_count"]) == (NAME, 5)
    assert got["total_duration"] >= got["load_duration"] >= 0


async def test_a_text_that_is_too_long_is_cut_unless_it_must_not_be() -> None:
    api = embedding()
    await vectors(api, ["x" * 50, "y"])
    assert [len(request.prompt) for request in api.generator.requests] == [20, 1]
    assert "input" in await refusal(api, EMBED, input=["y", "x" * 50], truncate=False)


async def test_nothing_has_no_vector() -> None:
    api = embedding()
    assert (await api.post(EMBED, {"model": NAME})).json()["embeddings"] == []
    assert (await api.post(EMBED, {"model": NAME, "input": []})).json()["embeddings"] == []
    assert (await api.post(OLD, {"model": NAME})).json() == {"embedding": []}


@pytest.mark.parametrize("path", [EMBED, OLD])
async def test_a_model_that_embeds_nothing_says_so(path: str) -> None:
    text = {"input": "a", "prompt": "a"} if path == EMBED else {"prompt": "a"}
    assert "does not embed texts" in await refusal(Api(FakeGenerator()), path, **text)
    assert "scores pairs of texts" in await refusal(embedding(scores=True), path, **text)


async def test_too_many_texts_are_refused() -> None:
    assert "2049 texts exceed the limit of 2048" in await refusal(embedding(), EMBED, input=["x"] * 2049)

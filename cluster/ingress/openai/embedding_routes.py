"""Vectors of texts, and how near texts are to each other: OpenAI's /v1/embeddings, Cohere's and Jina's rerank, vLLM's score."""

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.generation import request_params
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.prompt_length import check_length
from cluster.ingress.generation.text_vectors import TextVectors, unit
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.openai.request_bodies import (
    EmbeddingRequest,
    ModelRequest,
    RerankRequest,
    ScoreRequest,
)
from cluster.ingress.tenants.fair_threads import Steps
from core.errors import RequestError
from models.pooling.pooling import Pooling

B = TypeVar("B", bound=ModelRequest)
T = TypeVar("T")
Ids = list[tuple[int, ...]]


class EmbeddingRoutes:
    def __init__(self, answering: Answering) -> None:
        self._answering, self._texts = answering, TextVectors(answering)

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/embeddings", self.embeddings, EmbeddingRequest),
            *(HttpRoute("POST", path, self.score, ScoreRequest) for path in ("/score", "/v1/score")),
            *(
                HttpRoute("POST", path, self.rerank, RerankRequest)
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
        ]

    async def embeddings(self, http: HttpRequest) -> Response:
        body = await self._read(http, EmbeddingRequest)
        self._texts.check(body.model, body.dimensions)
        prompts = await self._texts.prompts(
            http,
            body.input,
            "input",
            add_special_tokens=body.add_special_tokens,
            truncation=body.truncate_prompt_tokens,
        )
        vectors = await self._answering.vectors(http, body.terms, prompts, "input")
        found = [self._texts.finished(vector, body.dimensions) for vector in vectors]
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
            for index, vector in enumerate(found)
        ]
        return JSONResponse({"object": "list", "data": data, "model": body.model, "usage": _usage(prompts)})

    async def score(self, http: HttpRequest) -> Response:
        """Score each pair by its cosine: `text_1` with each of `text_2`, or both lists' items in turn."""
        body = await self._read(http, ScoreRequest)
        first, second = _as_list(body.text_1), _as_list(body.text_2)
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: give one, or as many",
                field="text_1",
            )
        scores, prompts = await self._scores(http, body, first, second, "text_2")
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        return JSONResponse({**head, "model": body.model, "data": data, "usage": _usage(prompts)})

    async def rerank(self, http: HttpRequest) -> Response:
        """Rank `documents` by the cosine of each with `query`, nearest first."""
        body = await self._read(http, RerankRequest)
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        scores, prompts = await self._scores(http, body, [body.query], texts, "documents")
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if body.return_documents else {})
            for index in order
        ]
        answer_id = f"rerank-{uuid.uuid4().hex}"
        return JSONResponse(
            {"id": answer_id, "model": body.model, "usage": _usage(prompts), "results": results}
        )

    @property
    def _scorer(self) -> Pooling | None:
        """How a model that scores pairs does; None: it embeds."""
        pooling = self._answering.settings.pooling
        return pooling if pooling is not None and pooling.scores else None

    async def _scores(
        self, http: HttpRequest, body: ModelRequest, first: list[str], second: list[str], field: str
    ) -> tuple[list[float], Ids]:
        """Return how well each of `second` goes with the one, or its own, of `first`, and the prompts that were computed for it.

        A scorer says how well; else it is the cosine of the two vectors."""
        if (scorer := self._scorer) is None:
            prompts = await self._texts.prompts(http, [*first, *second], field)
            vectors = await self._answering.vectors(http, body.terms, prompts, field)
            pairs = zip(_repeated(vectors[: len(first)], len(second)), vectors[len(first) :], strict=True)
            return [_cosine(*pair) for pair in pairs], prompts
        pairs = list(zip(_repeated(first, len(second)), second, strict=True))
        encoded = await self._answering.aside(http, lambda: self._encoded(pairs, field))
        prompts = [tuple(ids) for ids, _ in encoded]
        vectors = await self._answering.vectors(http, body.terms, prompts, field, [at for _, at in encoded])
        return [_sigmoid(float(one[0])) if scorer.sigmoid else float(one[0]) for one in vectors], prompts

    def _encoded(self, pairs: Sequence[tuple[str, str]], field: str) -> Steps[list[tuple[list[int], int]]]:
        tokenizer, settings = self._answering.tokenizer, self._answering.settings
        encoded: list[tuple[list[int], int]] = []
        for pair in pairs:
            yield
            for text in pair:
                check_length(text, field, tokenizer, settings.max_context_tokens)
            encoded.append(tokenizer.encode_pair(*pair))
        return encoded

    async def _read(self, http: HttpRequest, kind: type[B]) -> B:
        body = await self._answering.read(http, kind)
        request_params.check_model(body.model, self._answering.settings)
        return body


def _usage(prompts: Ids) -> dict[str, int]:
    num_tokens = sum(map(len, prompts))
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _repeated(one_or_all: list[T], count: int) -> list[T]:
    return one_or_all if len(one_or_all) == count else one_or_all * count


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(unit(one) @ unit(other))


def _sigmoid(number: float) -> float:
    return float(1.0 / (1.0 + np.exp(-number)))


def _encoded(vector: np.ndarray, encoding: str) -> list[float] | str:
    return (
        vector.tolist() if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
    )

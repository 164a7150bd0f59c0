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
from cluster.ingress.generation.truncation import most_tokens, shortened
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.openai.request_bodies import (
    MAX_TEXTS,
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
        self._answering = answering

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
        if self._scorer is not None:
            raise RequestError(
                f"the model {body.model!r} scores pairs of texts (/v1/score, /v1/rerank) and embeds none",
                field="model",
            )
        size = self._answering.settings.embedding_size
        if body.dimensions is not None and body.dimensions > size:
            raise RequestError(f"dimensions: this model's vectors have {size}", field="dimensions")
        is_cut = body.truncate_prompt_tokens is not None
        prompts = await self._prompts(
            http, body.input, "input", add_special_tokens=body.add_special_tokens, is_cut=is_cut
        )
        prompts = self._shortened(body, prompts)
        vectors = self._finished(
            await self._answering.vectors(http, body.terms, prompts, "input"), body.dimensions
        )
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
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
            prompts = await self._prompts(http, [*first, *second], field)
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

    async def _prompts(
        self,
        http: HttpRequest,
        texts: request_params.Prompts,
        field: str,
        *,
        add_special_tokens: bool = True,
        is_cut: bool = False,
    ) -> Ids:
        answering = self._answering
        if (found := len(request_params.items_of(texts))) > MAX_TEXTS:
            raise RequestError(f"{field}: {found} texts exceed the limit of {MAX_TEXTS}", field=field)
        return await answering.aside(
            http,
            lambda: request_params.prompts_of(
                texts,
                field,
                answering.tokenizer,
                answering.settings,
                add_special_tokens=add_special_tokens,
                is_cut=is_cut,
            ),
        )

    def _shortened(self, body: EmbeddingRequest, prompts: Ids) -> Ids:
        """Return the beginnings of the texts, as far as the body wants them. Raises RequestError."""
        if body.truncate_prompt_tokens is None:
            return prompts
        most = most_tokens(body.truncate_prompt_tokens, self._answering.settings.longest_text)
        around = self._answering.tokenizer.encode("", add_special_tokens=body.add_special_tokens)
        return [shortened(prompt, most, around, keep_end=False) for prompt in prompts]

    def _finished(self, vectors: Sequence[np.ndarray], dimensions: int | None) -> list[np.ndarray]:
        """Return a vector cut to the first `dimensions`, and normalised as the checkpoint says."""
        pooling = self._answering.settings.pooling
        cut = [vector[:dimensions] for vector in vectors]
        return [_unit(vector) for vector in cut] if pooling is not None and pooling.normalise else cut


def _usage(prompts: Ids) -> dict[str, int]:
    num_tokens = sum(map(len, prompts))
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _repeated(one_or_all: list[T], count: int) -> list[T]:
    return one_or_all if len(one_or_all) == count else one_or_all * count


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(_unit(one) @ _unit(other))


def _sigmoid(number: float) -> float:
    return float(1.0 / (1.0 + np.exp(-number)))


def _encoded(vector: np.ndarray, encoding: str) -> list[float] | str:
    return (
        vector.tolist() if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
    )

"""Texts on the way to their vectors, for every route that gives any."""

import numpy as np
from fastapi import Request as HttpRequest

from cluster.ingress.bodies.request_fields import MAX_TEXTS
from cluster.ingress.generation import request_params
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.truncation import most_tokens, shortened
from core.errors import RequestError


class TextVectors:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def check(self, model: str, dimensions: int | None = None) -> None:
        """Raise RequestError where the model embeds no texts, or its vectors have fewer numbers."""
        settings = self._answering.settings
        if settings.pooling is not None and settings.pooling.scores:
            raise RequestError(
                f"the model {model!r} scores pairs of texts (/v1/score, /v1/rerank) and embeds none",
                field="model",
            )
        if dimensions is not None and dimensions > settings.embedding_size:
            raise RequestError(
                f"dimensions: this model's vectors have {settings.embedding_size}", field="dimensions"
            )

    async def prompts(
        self,
        http: HttpRequest,
        texts: request_params.Prompts,
        field: str,
        *,
        add_special_tokens: bool = True,
        truncation: int | None = None,
    ) -> list[tuple[int, ...]]:
        """Return each text's tokens. `truncation`: so many from its beginning; -1: as many as the model takes. Raises
        RequestError."""
        answering, settings = self._answering, self._answering.settings
        if (found := len(request_params.items_of(texts))) > MAX_TEXTS:
            raise RequestError(f"{field}: {found} texts exceed the limit of {MAX_TEXTS}", field=field)
        prompts = await answering.aside(
            http,
            lambda: request_params.prompts_of(
                texts,
                field,
                answering.tokenizer,
                settings,
                add_special_tokens=add_special_tokens,
                is_cut=truncation is not None,
            ),
        )
        if truncation is None:
            return prompts
        most = most_tokens(truncation, settings.longest_text)
        around = answering.tokenizer.encode("", add_special_tokens=add_special_tokens)
        return [shortened(prompt, most, around, keep_end=False) for prompt in prompts]

    def finished(self, vector: np.ndarray, dimensions: int | None = None) -> np.ndarray:
        """Return a vector cut to the first `dimensions`, and normalised as the checkpoint says."""
        pooling = self._answering.settings.pooling
        cut = vector[:dimensions]
        return unit(cut) if pooling is not None and pooling.normalise else cut


def unit(vector: np.ndarray) -> np.ndarray:
    """Return the vector at the length one."""
    return vector / max(float(np.linalg.norm(vector)), 1e-12)

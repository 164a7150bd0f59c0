"""llama.cpp's /infill: what stands between a prefix and a suffix, as its editor plugins ask for it."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field, WithJsonSchema

from cluster.ingress.bodies import request_fields as fields
from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, is_one_of
from cluster.ingress.bodies.cache_hints import CacheHintsBody, hints_of
from cluster.ingress.generation import request_params
from cluster.ingress.generation.answering import Answering
from cluster.ingress.generation.body_shape import Json
from cluster.ingress.generation.choices import TextPiece
from cluster.ingress.generation.prompt_length import beyond_context, check_length
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.openai.fill_in_middle import FillInMiddle, fill_in_middle
from cluster.ingress.requests.generation_request import GenerationRequest, Terms
from cluster.ingress.tenants.fair_threads import at_once
from core.types import FinishReason

_NO_LIMIT = "an answer has no time limit of its own here"
_LEAST_ROOM = 128
"""Tokens that stay for an answer whose length is open."""


class ExtraText(Strict):
    """Another file, or part of one, that helps the model."""

    filename: str = ""
    text: str


class InfillRequest(Strict):
    neutral: ClassVar[NeutralFields] = {
        **dict.fromkeys(
            ("cache_prompt", "id_slot", "n_keep", "n_probs", "response_fields", "timings_per_token"),
            (anything, ""),
        ),
        "samplers": (anything, ""),
        "n_indent": (is_one_of(0), "lines are indented as the model writes them"),
        "repeat_last_n": (anything, ""),
        "grammar": (is_one_of(""), "/v1/completions takes grammars"),
    }
    noted: ClassVar[NeutralFields] = {
        "t_max_prompt_ms": (anything, _NO_LIMIT),
        "t_max_predict_ms": (anything, _NO_LIMIT),
        "n_indent": (anything, "lines are indented as the model writes them"),
    }

    model: str | None = None
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraText], Field(max_length=1024, fail_fast=True)] | None = None
    prompt: str = ""
    """What the model is to go on with behind the prefix: the beginning of the line that the cursor is in."""
    n_predict: Annotated[int, Field(ge=-1)] | None = None
    stream: bool | None = None
    stop: fields.Stops | None = None
    seed: Annotated[int, Field(ge=-1)] | None = None
    repeat_penalty: Annotated[fields.RepetitionPenalty | None, fields.ANY_NUMBER] = None
    temperature: Annotated[fields.Temperature | None, fields.ANY_VALUE] = None
    top_k: Annotated[fields.TopK | None, fields.ANY_VALUE] = None
    top_p: Annotated[fields.Probability | None, fields.ANY_VALUE] = None
    min_p: Annotated[fields.MinP | None, fields.ANY_VALUE] = None
    presence_penalty: Annotated[fields.Penalty | None, fields.ANY_VALUE] = None
    frequency_penalty: Annotated[fields.Penalty | None, fields.ANY_VALUE] = None
    ignore_eos: Annotated[bool | None, fields.ANY_VALUE] = None
    cache_hints: Annotated[CacheHintsBody | None, WithJsonSchema({"title": "Cache Hints"})] = None

    @property
    def repetition_penalty(self) -> float | None:
        return self.repeat_penalty

    @property
    def wanted(self) -> int | None:
        """The most tokens of the answer; None where that is open."""
        return None if self.n_predict == -1 else self.n_predict

    def generation(self, model: str, ends: tuple[int, ...]) -> GenerationRequest:
        """Return how the answer is generated. `ends` are token ids that end it. Raises RequestError."""
        hints, retain = hints_of(self.cache_hints, None, None)
        return GenerationRequest(
            terms=Terms(model),
            prompt_field="input_prefix",
            max_tokens=self.wanted,
            sampling=fields.sampling_of(self),
            seed=None if self.seed == -1 else self.seed,
            stops=tuple(self.stop or ()),
            ends=ends,
            ignore_eos=bool(self.ignore_eos),
            stream=bool(self.stream),
            hints=hints,
            retain=retain,
        )


class InfillRoutes:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> list[HttpRoute]:
        return [HttpRoute("POST", "/infill", self.infill, InfillRequest)]

    async def infill(self, http: HttpRequest) -> Response:
        """Answer with what stands between a prefix and a suffix."""
        answering = self._answering
        body = await answering.read(http, InfillRequest)
        request_params.check_model(body.model, answering.settings)
        filled = await answering.aside(http, at_once(lambda: self._filled(body)))
        request = body.generation(body.model or answering.settings.model_name, filled.end)
        choices = await answering.choices(http, request, [filled.prompt], 1)
        shape = InfillShape(request.terms.model, len(filled.prompt), stopped=lambda: choices[0].stops.found)
        return await answering.answer(http, request, choices, 1, shape)

    def _filled(self, body: InfillRequest) -> FillInMiddle:
        """Return the prompt, without the first of the other files where all of them are too long. Raises RequestError."""
        tokenizer, settings = self._answering.tokenizer, self._answering.settings
        extra = [(each.filename, each.text) for each in body.input_extra or ()]
        texts = {"input_prefix": body.input_prefix, "input_suffix": body.input_suffix, "prompt": body.prompt}
        for name, text in texts.items():
            check_length(text, name, tokenizer, settings.max_context_tokens)
        most = settings.max_context_tokens - max(1, _LEAST_ROOM if body.wanted is None else body.wanted)
        while True:
            filled = fill_in_middle(
                tokenizer, body.input_prefix, body.input_suffix, extra, body.prompt, field="input_suffix"
            )
            if not extra and len(filled.prompt) >= settings.max_context_tokens:
                why = (
                    f"input_prefix and input_suffix have {len(filled.prompt)}, and the answer needs one more"
                )
                raise beyond_context(why, "input_prefix", settings.max_context_tokens)
            if len(filled.prompt) <= most or not extra:
                return filled
            extra = extra[len(extra) // 2 + 1 :] if len(filled.prompt) > 2 * most else extra[1:]


class InfillShape:
    """The answer in llama.cpp's form: `stop` is true in the last of a stream's events, and in the whole answer."""

    def __init__(self, model: str, num_prompt: int, *, stopped: Callable[[], str | None]) -> None:
        self._model, self._num_prompt, self._stopped = model, num_prompt, stopped
        self._finish: FinishReason | None = None

    def frame(self, chunk: str) -> str:
        return f"data: {chunk}\n\n"

    def opening(self, piece: TextPiece) -> list[str]:
        return []

    def chunks(self, piece: TextPiece) -> list[str]:
        self._finish = piece.finish or self._finish
        return [json.dumps({"index": 0, "content": piece.text, "stop": False})] if piece.text else []

    def closing(self, usage: Mapping[str, Any]) -> list[str]:
        return [json.dumps(self._last("", usage))]

    def error(self, status: int, body: Mapping[str, Any], request_id: str) -> str:
        return json.dumps(body)

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json:
        (own,) = pieces
        self._finish = own[-1].finish
        return self._last("".join(piece.text for piece in own), usage)

    def _last(self, content: str, usage: Mapping[str, Any]) -> Json:
        word = self._stopped()
        ended = "word" if word is not None else "limit" if self._finish is FinishReason.LENGTH else "eos"
        return {
            "index": 0,
            "content": content,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": self._num_prompt,
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "stop_type": ended,
            "stopping_word": word or "",
            "truncated": False,
        }

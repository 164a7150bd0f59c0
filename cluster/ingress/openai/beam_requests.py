"""What a client says of beam search, under vLLM's and transformers' names."""

from collections.abc import Callable
from typing import Any

from cluster.ingress.delivery.beam_search import BeamParams
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.openai.request_bodies import Common, CompletionRequest
from cluster.ingress.requests.generation_request import GenerationRequest
from core.errors import RequestError
from core.types import Grammar

_MAX_CANDIDATES = 2048

_NO_SAMPLING = "nothing is sampled by chance"
_NO_SHAPING = "beams are compared by what the model itself finds likely"
_NO_TEXT = "beams end at tokens: stop_token_ids, or the model's own end"


def _is_set(value: Any) -> bool:
    return bool(value)


def _differs_from(neutral: float) -> Callable[[Any], bool]:
    return lambda value: value is not None and value != neutral


_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    # name: (which values are refused beside use_beam_search, why)
    "stream": (_is_set, "the best beams are known at their ends"),
    "temperature": (_differs_from(0.0), _NO_SAMPLING),
    "top_p": (_differs_from(1.0), _NO_SAMPLING),
    "top_k": (lambda value: value is not None and value > 0, _NO_SAMPLING),
    "min_p": (_differs_from(0.0), _NO_SAMPLING),
    "repetition_penalty": (_differs_from(1.0), _NO_SHAPING),
    "presence_penalty": (_differs_from(0.0), _NO_SHAPING),
    "frequency_penalty": (_differs_from(0.0), _NO_SHAPING),
    "logit_bias": (_is_set, _NO_SHAPING),
    "allowed_token_ids": (_is_set, _NO_SHAPING),
    "bad_words": (_is_set, _NO_SHAPING),
    "min_tokens": (_is_set, _NO_SHAPING),
    "stop": (_is_set, _NO_TEXT),
    "thinking_token_budget": (lambda value: value is not None, _NO_SHAPING),
    "prompt_logprobs": (lambda value: value is not None, "ask for them without"),
}


def beams_of(
    body: Common, request: GenerationRequest, width: int, grammar: Grammar | None, settings: ApiSettings
) -> BeamParams | None:
    """None where no beam search is asked for. `width`: `best_of`, or `n`. Raises RequestError, naming the field."""
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(body, name) not in (None, neutral):
                raise RequestError(f"{name} goes with use_beam_search=true", field=name)
        return None
    for name, (refuses, why) in _REFUSED.items():
        if refuses(getattr(body, name, None)):
            raise RequestError(f"{name} does not go with use_beam_search: {why}", field=name)
    if grammar is not None:
        name = request.constrained_by
        raise RequestError(f"{name} does not go with use_beam_search: {_NO_SHAPING}", field=name)
    if isinstance(body, CompletionRequest):
        _check_completion(body)
    num_candidates = width * (1 + len(body.stop_token_ids or ()) + len(settings.eos_token_ids))
    if num_candidates > _MAX_CANDIDATES:
        raise RequestError(
            f"use_beam_search: {width} beams with as many stop tokens compare {num_candidates} tokens each, more than "
            f"{_MAX_CANDIDATES}",
            field="use_beam_search",
        )
    early = False if body.early_stopping is None else body.early_stopping
    return BeamParams(width, 1.0 if body.length_penalty is None else body.length_penalty, early)


def _check_completion(body: CompletionRequest) -> None:
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "echo with logprobs does not go with use_beam_search: ask for them without", field="echo"
        )
    if body.max_tokens == 0:
        raise RequestError("max_tokens=0 leaves use_beam_search nothing to find", field="max_tokens")

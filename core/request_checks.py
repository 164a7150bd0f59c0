"""What no step could compute: a request with such a value is refused, before it is among others that would fail with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Final

from core.errors import RequestError
from core.prompt_images import FIRST_ROW
from core.types import Request, SamplingParams, TokenId

ANY_TOKEN: Final = FIRST_ROW
"""No vocabulary is so large."""
_SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class UnknownToken:
    """A token that the model has no row for."""

    part: str
    """`prompt`, or the client's field that it is of."""
    token: TokenId


def unknown_token(request: Request, vocab_size: int) -> UnknownToken | None:
    """Return the first token of the request that is outside the vocabulary; None where there is none."""
    for part, tokens in _parts(request):
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            return UnknownToken(part, next(token for token in tokens if not 0 <= token < vocab_size))
    return None


def check_computable(request: Request, vocab_size: int) -> None:
    """Raise RequestError for a request with a token outside the vocabulary, or a number that no step can use."""
    if (found := unknown_token(request, vocab_size)) is not None:
        raise RequestError(
            f"{found.part}: token id {found.token} is outside the vocabulary of {vocab_size}",
            field=found.part,
        )
    if not request.prompt:
        raise RequestError("the prompt is empty", field="prompt")
    for name, is_usable in _numbers(request.sampling):
        if not is_usable:
            value = getattr(request.sampling, name)
            raise RequestError(f"{name}: {value!r} cannot be used to sample", field=name)


def _parts(request: Request) -> Iterator[tuple[str, Sequence[TokenId]]]:
    sampling = request.sampling
    yield "prompt", request.prompt
    yield "prompt", request.emitted
    yield "logit_bias", [token for token, _ in sampling.logit_bias]
    yield "allowed_token_ids", sampling.allowed_token_ids
    yield "bad_words", [*chain.from_iterable(sampling.bad_words)]
    yield "stop_token_ids", sampling.stop_token_ids
    yield "stop_token_ids", sampling.masked_until_min
    if (budget := sampling.thinking) is not None:
        yield "thinking_token_budget", (*budget.begin, *budget.end, *budget.forced)
    if (grammar := sampling.grammar) is not None:
        marks = (grammar.think_begin, grammar.think_end)
        yield "response_format", [mark for mark in marks if mark is not None]


def _numbers(sampling: SamplingParams) -> Iterator[tuple[str, bool]]:
    """Yield each parameter with whether a step can use its value."""
    yield "temperature", isfinite(sampling.temperature) and sampling.temperature >= 0
    yield "top_p", 0 < sampling.top_p <= 1
    yield "top_k", sampling.top_k >= 0
    yield "min_p", 0 <= sampling.min_p <= 1
    yield "repetition_penalty", isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0
    yield "presence_penalty", isfinite(sampling.presence_penalty)
    yield "frequency_penalty", isfinite(sampling.frequency_penalty)
    yield "logit_bias", all(isfinite(bias) for _, bias in sampling.logit_bias)
    yield "bad_words", all(sampling.bad_words)
    yield "seed", sampling.seed is None or sampling.seed in _SEEDS
    yield "max_tokens", sampling.max_tokens >= 1
    yield "thinking", sampling.thinking is None or bool(sampling.thinking.end)

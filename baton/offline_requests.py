"""`LLM`'s requests as a client would send them: what the API refuses is refused here, by the same rules."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from cluster.ingress.bodies.body_model import validate
from cluster.ingress.bodies.request_fields import Ids
from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.generation.request_params import ApiSettings, max_new_tokens, to_sampling
from cluster.ingress.openai.openai_requests import generation_of
from cluster.ingress.openai.request_bodies import CompletionRequest
from cluster.ingress.requests.generation_request import GenerationRequest
from core.errors import RequestError
from core.types import Grammar, SamplingParams, ThinkingBudget

DEFAULT_TOKENS = 64
Prompt = str | Sequence[int]
_Count = Annotated[int, Field(ge=-1, le=20)]


class OfflineRequest(CompletionRequest):
    """A prompt with `SamplingParams`, whose names fields have where clients say something else."""

    model_config = ConfigDict(revalidate_instances="always")

    prompt: str | Ids  # pyright: ignore[reportIncompatibleVariableOverride]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    bad_words: Annotated[list[Ids], Field(max_length=128)] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Words as `SamplingParams` has them, in tokens."""
    num_logprobs: _Count = -1
    num_prompt_logprobs: _Count = -1
    thinking: ThinkingBudget | None = None
    grammar: Grammar | None = None
    pooling: Literal[""] = ""
    second_text_at: Literal[0] = 0

    @property
    def generation(self) -> GenerationRequest:
        return replace(
            generation_of(self),
            default_tokens=DEFAULT_TOKENS,
            bad_words=tuple(tuple(word) for word in self.bad_words or ()),
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )


def offline_request(
    model: str,
    prompt: Prompt,
    params: SamplingParams | None,
    *,
    stop: str | Sequence[str],
    ignore_eos: bool,
) -> OfflineRequest:
    """Return the request for a prompt. Raises RequestError, naming the field."""
    fields = _fields(params) if params is not None else {}
    if stop:
        fields["stop"] = _listed(stop)
    own = {"model": model, "prompt": _listed(prompt), "ignore_eos": ignore_eos}
    return validate(OfflineRequest, {**own, **fields})


def sampling_of(
    body: OfflineRequest, num_prompt: int, settings: ApiSettings, tokenizer: ChatTokenizer
) -> SamplingParams:
    """Return the sampling parameters of a prompt of `num_prompt` tokens. Raises RequestError, naming the field."""
    request = body.generation
    max_tokens = max_new_tokens(request, num_prompt, settings)
    sampling = to_sampling(request, settings, tokenizer)
    return replace(sampling, max_tokens=max_tokens, thinking=body.thinking, grammar=body.grammar)


def _fields(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters as fields of a body. `masked_until_min` follows from the others."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed")
    more = (
        "frequency_penalty",
        "num_logprobs",
        "num_prompt_logprobs",
        "max_tokens",
        "min_tokens",
        "thinking",
    )
    fields = {name: getattr(params, name) for name in (*names, *more, "grammar", "pooling", "second_text_at")}
    for name in ("allowed_token_ids", "stop_token_ids"):
        if tokens := getattr(params, name):
            fields[name] = _listed(tokens)
    if params.bad_words:
        fields["bad_words"] = [_listed(word) for word in params.bad_words]
    if params.logit_bias:
        fields["logit_bias"] = _biases(params.logit_bias)
    return fields


def _biases(pairs: Iterable[Any]) -> dict[str, Any]:
    """Return biases as a client sends them: by the id's text."""
    pairs = [*(pairs.items() if isinstance(pairs, Mapping) else pairs)]
    try:
        found = {str(_plain(token)): bias for token, bias in pairs}
    except (TypeError, ValueError):
        raise RequestError(
            "logit_bias must be pairs of a token id and a number", field="logit_bias"
        ) from None
    if len(found) < len(pairs):
        raise RequestError("logit_bias names one token id twice", field="logit_bias")
    return found


def _listed(tokens: Any) -> Any:
    return (
        tokens
        if isinstance(tokens, str) or not isinstance(tokens, Iterable)
        else [_plain(one) for one in tokens]
    )


def _plain(number: Any) -> Any:
    """Return any library's integer as Python's own."""
    return number if isinstance(number, bool) or not isinstance(number, Integral) else int(number)

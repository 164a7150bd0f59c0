"""From a validated body to what the engine takes. Everything that could not be served is refused here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbits
from typing import Any, Literal

from cluster.ingress.api.chat_messages import MessageStyle, template_messages
from cluster.ingress.api.generator import ChatTokenizer
from cluster.ingress.api.openai_requests import ChatRequest, Common, CompletionRequest, TokenizeRequest
from cluster.ingress.parsers.model_formats import ReasoningFormat, ToolFormat
from core.errors import RequestError
from core.types import SamplingParams

_COMPLETION_DEFAULT_TOKENS = 16
_MAX_ID_DIGITS = 12
_SEED_MASK = 2**63 - 1
_TEMPLATE_RESERVED = {
    *("messages", "conversation", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
}
"""What a client may not set through chat_template_kwargs; above all not the template, which is a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    model_name: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0
    max_n: int = 128
    response_store_bytes: int = 64 << 20
    tool_call_parser: ToolFormat | Literal["auto"] = "auto"
    reasoning_parser: ReasoningFormat | Literal["auto"] = "auto"
    tokenizer_folder: Path | None = None
    """Where the tokenizer.json is that grammars are compiled for; None: answers cannot be constrained."""


def check_model(name: str | None, settings: ApiSettings) -> None:
    if name is not None and name != settings.model_name:
        raise RequestError(
            f"the model {name!r} does not exist; this server has {settings.model_name!r}",
            field="model",
            status=404,
            code="model_not_found",
        )


def chat_prompt(
    body: ChatRequest,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any],
    tokenizer: ChatTokenizer,
) -> tuple[int, ...]:
    """Raises RequestError."""
    if reserved := _TEMPLATE_RESERVED.intersection(template_arguments):
        raise RequestError(
            f"chat_template_kwargs: {min(reserved)!r} cannot be set there", field="chat_template_kwargs"
        )
    prompt = tuple(
        tokenizer.chat_template(
            messages, tools=tools, add_generation_prompt=body.add_generation_prompt, **template_arguments
        )
    )
    if not prompt:
        raise RequestError("the conversation renders to no tokens", field="messages")
    return prompt


def tokenized(body: TokenizeRequest, tokenizer: ChatTokenizer, style: MessageStyle) -> list[int]:
    """Raises RequestError."""
    if body.messages is None:
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    messages = template_messages(body.messages, style)
    return tokenizer.chat_template(messages, add_generation_prompt=body.add_generation_prompt)


def completion_prompts(
    body: CompletionRequest, tokenizer: ChatTokenizer, settings: ApiSettings
) -> list[tuple[int, ...]]:
    """One token sequence for each prompt of the body."""
    raw = body.prompt
    items: Sequence[object] = [raw] if isinstance(raw, str) or isinstance(raw[0], int) else raw
    prompts: list[tuple[int, ...]] = []
    for item in items:
        ids = tuple(tokenizer.encode(item)) if isinstance(item, str) else tuple(item)  # type: ignore[arg-type]
        if not ids:
            raise RequestError("the prompt is empty", field="prompt")
        if max(ids) >= settings.vocab_size:
            raise RequestError(
                f"token id {max(ids)} is outside the vocabulary of {settings.vocab_size}", field="prompt"
            )
        prompts.append(ids)
    return prompts


def max_new_tokens(body: Common, num_prompt: int, settings: ApiSettings) -> int:
    """How many tokens may be generated. Raises RequestError when prompt and output exceed the context."""
    chat = isinstance(body, ChatRequest)
    field_name = "messages" if chat else "prompt"
    room = settings.max_context_tokens - num_prompt
    wanted = body.max_tokens
    if chat and body.max_completion_tokens is not None:
        wanted = body.max_completion_tokens
    if room < 1 or (wanted is not None and wanted > room):
        asked = (
            f"and max_tokens asks for {wanted}" if wanted is not None else "and nothing is left for an answer"
        )
        raise RequestError(
            f"this model's context is {settings.max_context_tokens} tokens; the {field_name} has {num_prompt} {asked}",
            field=field_name,
            code="context_length_exceeded",
        )
    if wanted is None:
        wanted = room if chat else min(room, _COMPLETION_DEFAULT_TOKENS)
    return wanted


def to_sampling(body: Common, max_tokens: int, settings: ApiSettings) -> SamplingParams:
    """Raises RequestError, naming the field."""
    defaults = settings.default_sampling

    def pick(name: str, otherwise: float) -> float:
        value = getattr(body, name)
        return value if value is not None else defaults.get(name, otherwise)

    stop_ids = tuple(_in_vocabulary(token, "stop_token_ids", settings) for token in body.stop_token_ids or ())
    if body.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens ({body.min_tokens}) exceeds max_tokens ({max_tokens})", field="min_tokens"
        )
    return SamplingParams(
        temperature=pick("temperature", 1.0),
        top_p=pick("top_p", 1.0),
        top_k=max(0, int(pick("top_k", 0))),
        min_p=pick("min_p", 0.0),
        repetition_penalty=pick("repetition_penalty", 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=(randbits(63) if body.seed is None else body.seed) & _SEED_MASK,
        logit_bias=_logit_bias(body.logit_bias or {}, settings),
        num_logprobs=_num_logprobs(body),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=stop_ids if body.ignore_eos else stop_ids + settings.eos_token_ids,
        masked_until_min=stop_ids + settings.eos_token_ids,
    )


def check_count(body: Common, num_prompts: int, settings: ApiSettings) -> int:
    """`n`, bounded. Raises RequestError."""
    n = body.n or 1
    if isinstance(body, CompletionRequest) and body.best_of not in (None, n):
        raise RequestError("best_of other than n is not supported", field="best_of")
    if n * num_prompts > settings.max_n:
        raise RequestError(
            f"{n} choices for {num_prompts} prompts exceed the limit of {settings.max_n}", field="n"
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream=true", field="stream_options")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        raise RequestError("echo together with logprobs is not supported", field="echo")
    if isinstance(body, ChatRequest) and body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs=true", field="top_logprobs")
    return n


def seed_of_choice(seed: int, choice: int) -> int:
    """Choices of one request draw different numbers, the first those of the request's own seed."""
    return (seed + choice) & _SEED_MASK


def _num_logprobs(body: Common) -> int:
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else -1
    assert isinstance(body, CompletionRequest)
    return -1 if body.logprobs is None else body.logprobs


def _logit_bias(bias: Mapping[str, float], settings: ApiSettings) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for name, value in bias.items():
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS):
            raise RequestError(f"logit_bias: {name!r} is no token id", field="logit_bias")
        pairs.append((_in_vocabulary(int(name), "logit_bias", settings), value))
    if len(dict(pairs)) < len(pairs):
        raise RequestError("logit_bias names one token id twice", field="logit_bias")
    return tuple(pairs)


def _in_vocabulary(token: int, name: str, settings: ApiSettings) -> int:
    if token >= settings.vocab_size:
        raise RequestError(
            f"{name}: token id {token} is outside the vocabulary of {settings.vocab_size}", field=name
        )
    return token

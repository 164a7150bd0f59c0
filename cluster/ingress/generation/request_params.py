"""Turns a validated body into what the engine takes. Everything that could not be served is refused here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbits
from typing import Any, Literal

from cluster.ingress.bodies.body_model import UnknownFields
from cluster.ingress.bodies.request_bodies import (
    ChatRequest,
    Common,
    CompletionRequest,
    Prompts,
)
from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.generation.prompt_length import beyond_context, check_counted, check_length
from cluster.ingress.images.image_fetching import PictureFetcher
from cluster.ingress.images.image_intake import PictureIntake
from cluster.ingress.templates.chat_template import ChatTemplate
from cluster.ingress.tenants.fair_threads import Steps
from core.config.adapter_config import ServedAdapter
from core.config.answer_formats import ReasoningFormat, ToolFormat
from core.errors import RequestError
from core.types import SamplingParams
from models.pooling.pooling import Pooling

_COMPLETION_DEFAULT_TOKENS = 16
_MAX_ID_DIGITS = 12
_SEED_MASK = 2**63 - 1
_TEMPLATE_RESERVED = {
    "self",
    *("messages", "conversation", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    *(
        "template_name",
        "tokenize",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
    ),
    *("return_tensors", "return_dict"),
}
"""What a client may not set through chat_template_kwargs: above all the template, which is a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    model_name: str
    aliases: tuple[str, ...] = ()
    """More names of the model."""
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict[str, ServedAdapter])
    """What `model` may name, too: the model with an adapter. They may change while the server runs."""
    describe_adapter: Callable[[str, str], ServedAdapter] | None = None
    """(name, path) -> an adapter that may be loaded while the server runs. Raises ConfigError. None: none may."""
    max_adapters: int = 0
    """How many there can be at once."""
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    allowed_origins: tuple[str, ...] = ()
    """Whose pages may ask from a browser."""
    unknown_fields: UnknownFields = "warn"
    max_body_bytes: int = 8 << 20
    body_timeout_s: float = 30.0
    keep_alive_s: float = 25.0
    max_n: int = 128
    response_store_bytes: int = 64 << 20
    tool_call_parser: ToolFormat | Literal["auto"] = "auto"
    reasoning_parser: ReasoningFormat | Literal["auto"] = "auto"
    pictures: PictureIntake | None = None
    """None where the model reads text alone."""
    picture_fetcher: PictureFetcher | None = None
    """None where no URL of a picture is fetched."""
    tokenizer_folder: Path | None = None
    """The folder of the tokenizer.json that grammars are compiled for. None means that answers cannot be constrained."""
    pooling: Pooling | None = None
    """How the model embeds texts; None where it does not."""
    generates: bool = True
    embedding_size: int = 0

    @property
    def longest_text(self) -> int:
        """The most tokens of a text that is embedded."""
        own = self.pooling.max_tokens if self.pooling is not None else None
        return min(own or self.max_context_tokens, self.max_context_tokens)


def check_model(name: str | None, settings: ApiSettings) -> None:
    names = (settings.model_name, *settings.aliases, *settings.adapters)
    if name is not None and name not in names:
        raise RequestError(
            f"the model {name!r} does not exist; this server has {', '.join(map(repr, names))}",
            field="model",
            status=404,
            code="model_not_found",
        )


def check_generates(settings: ApiSettings) -> None:
    """Raise RequestError where the served model only embeds or scores."""
    if settings.generates:
        return
    scores = settings.pooling is not None and settings.pooling.scores
    does = "scores pairs of texts (/v1/score)" if scores else "embeds texts (/v1/embeddings)"
    raise RequestError(
        f"the model {settings.model_name!r} {does} and does not generate; a decoder model would, started with "
        "model.pooling=none or last",
        field="model",
    )


def adapter_of(name: str, settings: ApiSettings) -> str:
    """Return the key of the adapter that `model` names; empty where it names the model as it is."""
    adapter = settings.adapters.get(name)
    return "" if adapter is None else adapter.key


def chat_prompt(
    body: ChatRequest,
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any],
    template: ChatTemplate,
    tokenizer: ChatTokenizer,
    max_context_tokens: int,
    *,
    shown: Callable[[str], str],
    is_counted: bool,
) -> tuple[int, ...]:
    """Return a chat's prompt. `shown` takes its text and returns what is tokenized. `is_counted`: only its length is wanted,
    which may be more than the context's. Raises RequestError."""
    if reserved := _TEMPLATE_RESERVED.intersection(template_arguments):
        raise RequestError(
            f"chat_template_kwargs: {min(reserved)!r} cannot be set there", field="chat_template_kwargs"
        )
    goes_on = body.continue_final_message
    adds_prompt = body.add_generation_prompt and not goes_on
    text = template.render(body.messages, tools, template_arguments, adds_prompt=adds_prompt, goes_on=goes_on)
    if is_counted:
        check_counted(text, "messages", max_context_tokens)
    elif body.truncate_prompt_tokens is None:
        check_length(text, "messages", tokenizer, max_context_tokens)
    prompt = tuple(tokenizer.encode(shown(text), add_special_tokens=False))
    if not prompt:
        raise RequestError("the conversation renders to no tokens", field="messages")
    return prompt


def prompts_of(
    raw: Prompts,
    field_name: str,
    tokenizer: ChatTokenizer,
    settings: ApiSettings,
    *,
    add_special_tokens: bool = True,
    is_cut: bool = False,
) -> Steps[list[tuple[int, ...]]]:
    """Return one token sequence for each of the texts or lists of token ids in the body's field, in as many steps. They may
    still be outside the vocabulary. `is_cut`: one may be longer than the context. Raises RequestError."""
    prompts: list[tuple[int, ...]] = []
    for item in items_of(raw):
        yield
        if (is_text := isinstance(item, str)) and not is_cut:
            check_length(item, field_name, tokenizer, settings.max_context_tokens)
        ids = tuple(tokenizer.encode(item, add_special_tokens=add_special_tokens) if is_text else item)  # type: ignore[arg-type]
        if not ids:
            raise RequestError(f"the {field_name} is empty", field=field_name)
        prompts.append(ids)
    return prompts


def items_of(raw: Prompts) -> Sequence[object]:
    """Return the texts, or lists of token ids."""
    return [raw] if isinstance(raw, str) or isinstance(raw[0], int) else raw


def wanted_tokens(body: Common) -> int | None:
    """Return the most tokens that a body asks for; None where it leaves that open. Of a chat's two fields the smaller holds."""
    given = (body.max_tokens, body.max_completion_tokens if isinstance(body, ChatRequest) else None)
    return min((limit for limit in given if limit is not None), default=None)


def max_new_tokens(body: Common, num_prompt: int, settings: ApiSettings) -> int:
    """Return how many tokens may be generated. Raises RequestError when prompt and output exceed the context."""
    chat = isinstance(body, ChatRequest)
    field_name = "messages" if chat else "prompt"
    room = settings.max_context_tokens - num_prompt
    wanted = wanted_tokens(body)
    if room < 1:
        why = f"the prompt is too long: {num_prompt} tokens > {settings.max_context_tokens - 1} maximum"
        raise beyond_context(why, field_name, settings.max_context_tokens)
    if wanted is not None and wanted > room:
        why = f"the prompt has {num_prompt}, and the answer may have {wanted} more"
        raise beyond_context(why, field_name, settings.max_context_tokens)
    if wanted is None:
        wanted = room if chat else min(room, _COMPLETION_DEFAULT_TOKENS)
    if body.min_tokens > (most := max(1, wanted)):
        raise RequestError(f"min_tokens ({body.min_tokens}) exceeds max_tokens ({most})", field="min_tokens")
    return most  # a token is drawn even where none is wanted: its step scores the prompt


def to_sampling(
    body: Common,
    settings: ApiSettings,
    tokenizer: ChatTokenizer,
    *,
    bad_words: tuple[tuple[int, ...], ...] | None = None,
) -> SamplingParams:
    """Return the sampling parameters of the first prompt, without `max_tokens`. Their tokens may still be outside the vocabulary.
    `bad_words`: the body's, where they are tokens already. Raises RequestError, naming the field."""
    defaults = settings.default_sampling

    def pick(name: str, otherwise: float) -> float:
        value = getattr(body, name)
        return value if value is not None else defaults.get(name, otherwise)

    stop_ids = tuple(body.stop_token_ids or ())
    if bad_words is None:
        bad_words = _bad_words(body.bad_words or (), tokenizer)
    masked_until_min = stop_ids + settings.eos_token_ids
    allowed = _allowed(body, bad_words, masked_until_min)
    return SamplingParams(
        temperature=pick("temperature", 1.0),
        top_p=pick("top_p", 1.0),
        top_k=min(max(0, int(pick("top_k", 0))), settings.vocab_size),
        min_p=pick("min_p", 0.0),
        repetition_penalty=pick("repetition_penalty", 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=seed_of_prompt(body),
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=allowed,
        bad_words=bad_words,
        num_logprobs=_num_logprobs(body),
        num_prompt_logprobs=_num_prompt_logprobs(body),
        min_tokens=body.min_tokens,
        stop_token_ids=stop_ids if body.ignore_eos else stop_ids + settings.eos_token_ids,
        masked_until_min=masked_until_min,
    )


def _allowed(
    body: Common, bad_words: Sequence[tuple[int, ...]], masked_until_min: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the only tokens that may be drawn; none for all. Raises RequestError where none of them could be."""
    allowed = tuple(body.allowed_token_ids or ())
    never = {word[0] for word in bad_words if len(word) == 1}
    if allowed and not set(allowed) - never:
        raise RequestError(
            "allowed_token_ids: bad_words leave nothing of them that could be drawn",
            field="allowed_token_ids",
        )
    if allowed and body.min_tokens and not set(allowed) - never - set(masked_until_min):
        raise RequestError(
            "allowed_token_ids: nothing but stop tokens, which min_tokens puts off", field="allowed_token_ids"
        )
    return allowed


def check_count(body: Common, num_prompts: int, settings: ApiSettings) -> int:
    """Return how many choices of each prompt are to be generated. Raises RequestError."""
    n = body.n or 1
    if isinstance(body, CompletionRequest) and body.best_of is not None:
        if body.best_of < n:
            raise RequestError(f"best_of ({body.best_of}) is less than n ({n})", field="best_of")
        if body.best_of > n and body.stream:
            raise RequestError(
                "best_of: the best of several answers are known at their ends; ask without stream",
                field="best_of",
            )
        n = body.best_of
    if n * num_prompts > settings.max_n:
        by_name = isinstance(body, CompletionRequest) and body.best_of is not None
        raise RequestError(
            f"{n} choices for {num_prompts} prompts exceed the limit of {settings.max_n}",
            field="best_of" if by_name else "n",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream=true", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs: ask without stream", field="prompt_logprobs")
    if isinstance(body, ChatRequest) and body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs=true", field="top_logprobs")
    return n


def constrained_by(body: Common) -> str:
    """Name the field that asks for a grammar, where one of them does."""
    if body.structured_outputs is not None:
        return "structured_outputs"
    return "response_format" if body.is_structured else "tools"


def check_constrainable(body: Common, field: str, settings: ApiSettings) -> None:
    """Raise RequestError where the rest of the body leaves a grammar no token, or no end. `field` asks for the grammar."""
    for limit in ("allowed_token_ids", "bad_words"):
        if getattr(body, limit):
            raise RequestError(
                f"{limit} does not go with {field}: together they may leave no token", field=limit
            )
    if not body.stop_token_ids and (body.ignore_eos or not settings.eos_token_ids):
        reason = "ignore_eos is true" if body.ignore_eos else "this model has no end-of-sequence token"
        raise RequestError(f"{field}: an answer could not end where it is complete: {reason}", field=field)


def seed_of_prompt(body: Common) -> int:
    """Return the body's seed, or else a random one for each prompt: equal prompts may have different answers."""
    return (randbits(63) if body.seed is None else body.seed) & _SEED_MASK


def seed_of_choice(seed: int, choice: int) -> int:
    """Return a choice's seed. Choices of one request draw different numbers, and the first one uses the request's own seed."""
    return (seed + choice) & _SEED_MASK


def _bad_words(words: Sequence[str], tokenizer: ChatTokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the beginning of a text and behind a space."""
    spellings = (spelling for word in words for spelling in (word, " " + word.lstrip()))
    encoded = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(ids for ids in encoded if ids))


def _num_prompt_logprobs(body: Common) -> int:
    echoed = -1
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        echoed = body.logprobs
    return max(echoed, -1 if body.prompt_logprobs is None else body.prompt_logprobs)


def _num_logprobs(body: Common) -> int:
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else -1
    assert isinstance(body, CompletionRequest)
    if body.logprobs is None:
        # The best of several are those with the likeliest tokens.
        return 0 if (body.best_of or 1) > (body.n or 1) else -1
    return body.logprobs


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for name, value in bias.items():
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS):
            raise RequestError(f"logit_bias: {name!r} is no token id", field="logit_bias")
        pairs.append((int(name), value))
    if len(dict(pairs)) < len(pairs):
        raise RequestError("logit_bias names one token id twice", field="logit_bias")
    return tuple(pairs)

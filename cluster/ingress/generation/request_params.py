"""Turns a request into what the engine takes. Everything that could not be served is refused here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbits
from typing import Literal

from cluster.ingress.bodies.body_model import UnknownFields
from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.generation.prompt_length import beyond_context, check_length
from cluster.ingress.images.image_fetching import ImageFetcher
from cluster.ingress.images.image_intake import ImageIntake
from cluster.ingress.requests.generation_request import GenerationRequest
from cluster.ingress.tenants.fair_threads import Steps
from core.config.adapter_config import ServedAdapter
from core.config.answer_formats import ReasoningFormat, ToolFormat
from core.errors import RequestError
from core.types import SamplingParams, Slo
from models.pooling.pooling import Pooling

_SEED_MASK = 2**63 - 1
Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""A text or its token ids, or several of one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    model_name: str
    aliases: tuple[str, ...] = ()
    """More names of the model."""
    slo_classes: Mapping[str, Slo] = field(default_factory=dict[str, Slo])
    """Service classes whose targets are this model's own."""
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
    resume_s: float = 0.0
    """How long a client may be away and still have the rest of its answer; 0: not at all."""
    max_n: int = 128
    response_store_bytes: int = 64 << 20
    response_age_s: float = 30 * 86400.0
    file_store_bytes: int = 0
    usage_folder: Path | None = None
    """What files may take of the store; 0: there are neither files nor batches."""
    tool_call_parser: ToolFormat | Literal["auto"] = "auto"
    reasoning_parser: ReasoningFormat | Literal["auto"] = "auto"
    images: ImageIntake | None = None
    """None where the model reads text alone."""
    image_fetcher: ImageFetcher | None = None
    """None where no URL of an image is fetched."""
    tokenizer_folder: Path | None = None
    """The folder of the tokenizer.json that grammars are compiled for. None means that answers cannot be constrained."""
    pooling: Pooling | None = None
    """How the model embeds texts; None where it does not."""
    sleeps_on_demand: bool = False
    """The model sleeps when nobody has asked for a while, and requests wake it."""
    generates: bool = True
    embedding_size: int = 0

    def serves(self, model: str) -> bool:
        """Return whether this is a name of the model or of an adapter."""
        return model in (self.model_name, *self.aliases) or model in self.adapters

    @property
    def names(self) -> tuple[str, ...]:
        """All that `model` may be."""
        return (self.model_name, *self.aliases, *self.adapters)

    @property
    def longest_text(self) -> int:
        """The most tokens of a text that is embedded."""
        own = self.pooling.max_tokens if self.pooling is not None else None
        return min(own or self.max_context_tokens, self.max_context_tokens)


def check_model(name: str | None, settings: ApiSettings) -> None:
    if name is not None and name not in settings.names:
        raise no_such_model(name, settings.names)


def no_such_model(name: str, names: Iterable[str]) -> RequestError:
    """Return the error for a model that is not among `names`."""
    return RequestError(
        f"the model {name!r} does not exist; this server has {', '.join(map(repr, names)) or 'none'}",
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


def max_new_tokens(request: GenerationRequest, num_prompt: int, settings: ApiSettings) -> int:
    """Return how many tokens may be generated. Raises RequestError when prompt and output exceed the context."""
    room = settings.max_context_tokens - num_prompt
    wanted = request.max_tokens
    if room < 1:
        why = f"the prompt is too long: {num_prompt} tokens > {settings.max_context_tokens - 1} maximum"
        raise beyond_context(why, request.prompt_field, settings.max_context_tokens)
    if wanted is not None and wanted > room:
        why = f"the prompt has {num_prompt}, and the answer may have {wanted} more"
        raise beyond_context(why, request.prompt_field, settings.max_context_tokens)
    if wanted is None:
        wanted = min(room, request.default_tokens or room)
    if request.min_tokens > (most := max(1, wanted)):
        raise RequestError(
            f"min_tokens ({request.min_tokens}) exceeds max_tokens ({most})", field="min_tokens"
        )
    return most  # a token is sampled even where none is wanted: its step scores the prompt


def to_sampling(
    request: GenerationRequest, settings: ApiSettings, tokenizer: ChatTokenizer
) -> SamplingParams:
    """Return the sampling parameters of the first prompt, without `max_tokens`. Their tokens may still be outside the vocabulary.
    Raises RequestError, naming the field."""
    wanted, chosen = {**settings.default_sampling, **request.sampling}, request.sampling
    stop_ids = request.stop_token_ids
    bad_words = _bad_words(request.bad_words, tokenizer)
    masked_until_min = stop_ids + settings.eos_token_ids
    allowed = _allowed(request, bad_words, masked_until_min)
    return SamplingParams(
        temperature=wanted.get("temperature", 1.0),
        top_p=wanted.get("top_p", 1.0),
        top_k=min(max(0, int(wanted.get("top_k", 0))), settings.vocab_size),
        min_p=wanted.get("min_p", 0.0),
        repetition_penalty=wanted.get("repetition_penalty", 1.0),
        presence_penalty=chosen.get("presence_penalty", 0.0),
        frequency_penalty=chosen.get("frequency_penalty", 0.0),
        seed=seed_of_prompt(request, randbits(63)),
        logit_bias=request.logit_bias,
        allowed_token_ids=allowed,
        bad_words=bad_words,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        min_tokens=request.min_tokens,
        stop_token_ids=(
            *(stop_ids if request.ignore_eos else stop_ids + settings.eos_token_ids),
            *(token for token in request.ends if token < settings.vocab_size),
        ),
        grammar=request.grammar,
        masked_until_min=masked_until_min,
    )


def _allowed(
    request: GenerationRequest, bad_words: Sequence[tuple[int, ...]], masked_until_min: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the only tokens that may be sampled; none for all. Raises RequestError where none of them could be."""
    allowed = request.allowed_token_ids
    never = {word[0] for word in bad_words if len(word) == 1}
    if allowed and not set(allowed) - never:
        raise RequestError(
            "allowed_token_ids: bad_words leave nothing of them that could be sampled",
            field="allowed_token_ids",
        )
    if allowed and request.min_tokens and not set(allowed) - never - set(masked_until_min):
        raise RequestError(
            "allowed_token_ids: nothing but stop tokens, which min_tokens puts off", field="allowed_token_ids"
        )
    return allowed


def check_constrainable(request: GenerationRequest, field: str, settings: ApiSettings) -> None:
    """Raise RequestError where the rest of the request leaves a grammar no token, or no end. `field` asks for the grammar."""
    for limit in ("allowed_token_ids", "bad_words"):
        if getattr(request, limit):
            raise RequestError(
                f"{limit} does not go with {field}: together they may leave no token", field=limit
            )
    if not request.stop_token_ids and (request.ignore_eos or not settings.eos_token_ids):
        reason = "ignore_eos is true" if request.ignore_eos else "this model has no end-of-sequence token"
        raise RequestError(f"{field}: an answer could not end where it is complete: {reason}", field=field)


def seed_of_prompt(request: GenerationRequest, otherwise: int) -> int:
    """Return the request's seed, or else the one that is given: equal prompts may have different answers."""
    return (otherwise if request.seed is None else request.seed) & _SEED_MASK


def seed_of_choice(seed: int, choice: int) -> int:
    """Return a choice's seed. Choices of one request use different numbers, and the first one uses the request's own seed."""
    return (seed + choice) & _SEED_MASK


def _bad_words(
    words: Sequence[str | tuple[int, ...]], tokenizer: ChatTokenizer
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word: of a text at the beginning of an answer and behind a space."""
    spellings = (
        each for word in words for each in ((word, " " + word.lstrip()) if isinstance(word, str) else (word,))
    )
    encoded = (
        tuple(tokenizer.encode(each, add_special_tokens=False)) if isinstance(each, str) else each
        for each in spellings
    )
    return tuple(dict.fromkeys(ids for ids in encoded if ids))

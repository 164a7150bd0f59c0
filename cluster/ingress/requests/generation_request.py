"""What a client asks of the model, whichever API it came by. Behind the APIs nobody reads a client's body.

Each API validates its own body once and makes these. Complaints about them name the fields as that API has them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.ingress.parsers.call_grammars import AnswerSchema
from core.types import CacheHints, Grammar

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_NO_HINTS = CacheHints()


@dataclass(frozen=True, slots=True)
class Terms:
    """Who answers, when, and with whom prefixes are shared."""

    model: str
    service_tier: str | None = None
    """The service class, where the header x-slo-class names none. `auto` and `default` mean the tenant's own."""
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the whole answer must be."""

    field: str
    """The field that asks for it."""
    grammar: str
    """llguidance's."""
    schema: AnswerSchema | None = None
    """The same as a schema. None: no schema says it, and it does not go with tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """How a prompt, or each of several, is continued. None means the model's default."""

    terms: Terms
    prompt_field: str
    """The field that the prompt is made of."""
    max_tokens: int | None = None
    """With 0 only the prompt is of interest."""
    default_tokens: int | None = None
    """The most tokens where `max_tokens` is None; None: as many as the context has room for."""
    min_tokens: int = 0
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the client chose of `SAMPLING`. The model's defaults hold for the rest."""
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or their tokens, that the answer does not contain."""
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    """Token ids that end the answer as well, as far as the model has them."""
    ignore_eos: bool = False
    include_stop: bool = False
    """Whether a stop string that ends the answer stays in it."""
    skip_special_tokens: bool = True
    num_logprobs: int = -1
    """As in `SamplingParams`."""
    num_prompt_logprobs: int = -1
    truncate_prompt_tokens: int | None = None
    """The number of tokens of a prompt that are taken. -1: as many as the model takes."""
    stream: bool = False
    thinking_tokens: int | None = None
    """The tokens after which the end of reasoning is forced."""
    form: AnswerForm | None = None
    hints: CacheHints = _NO_HINTS
    retain: bool = True
    """Whether the request's KV may be wanted again."""

    @property
    def grammar(self) -> Grammar | None:
        return None if self.form is None else Grammar(text=self.form.grammar)

    @property
    def constrained_by(self) -> str:
        """The field that asks for a grammar, where one of them does."""
        return "tools" if self.form is None else self.form.field

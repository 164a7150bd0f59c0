"""What a request is and what comes back for it. Invariant: every value here is immutable and crosses processes as it is."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Literal

from core.prompt_images import PromptImage, with_names
from core.records import record

TokenId = int


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """A service class: the latency targets of one request, from its class name in the configuration.

    A class without targets is served as by an ordinary server: in the order of arrival, in steps as large as the engine takes."""

    name: str = "standard"
    ttft_s: float = inf
    """The target for the time to the first token; infinite: none."""
    tpot_s: float = inf
    """The target for the mean time of each further token; infinite: none."""
    priority: int = 0
    """Higher is served first among requests that wait."""
    weight: float = 1.0
    """Service of twice the weight is charged to its tenant at half the price."""
    hopeless: Literal["refuse", "run"] = "run"
    """What happens, under overload, to a prompt whose first token even an idle instance could not give in time: it runs, or is
    refused with what would be possible."""

    @property
    def is_timed(self) -> bool:
        """Whether it names a target for the first token."""
        return self.ttft_s < inf

    def giving_way(self) -> "Slo":
        """Return the class as one whose requests give way to this one's: it has the next lower priority."""
        return replace(self, priority=self.priority - 1)


STANDARD = Slo()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How many tokens the reasoning at an answer's beginning may have before its end is forced."""

    max_tokens: int
    begin: tuple[TokenId, ...]
    """What opens the reasoning; empty: the prompt has opened it."""
    end: tuple[TokenId, ...]
    """What ends the reasoning where the model ends it by itself."""
    forced: tuple[TokenId, ...]
    """The tokens that follow a spent budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the output must be. Which tokens may follow is a function of this and of the output tokens alone."""

    text: str
    """In llguidance's form: Lark, or JSON with a list of grammars."""
    think_begin: TokenId | None = None
    """An output that begins with this token is free until `think_end`."""
    think_end: TokenId | None = None
    """The grammar holds behind the first of these. Without `think_begin` the prompt has opened the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. The sample for output position i depends on (seed, i) and the logits alone."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None: whoever makes requests of it gives each a seed of its own. Requests have one."""
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    allowed_token_ids: tuple[TokenId, ...] = ()
    """Nothing else is sampled; empty: anything."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Sequences of tokens whose last token is never sampled behind the others."""
    num_logprobs: int = -1
    """-1: none; 0: of the sampled token; k: of the sampled token and the k likeliest."""
    num_prompt_logprobs: int = -1
    """The same for each token of the prompt but its first. No cached prefix is used then: its logits are not kept."""
    max_tokens: int = 16
    """Output tokens over all attempts."""
    min_tokens: int = 0
    """Stop tokens cannot be sampled before this many output tokens exist."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Any of these ends the sequence; the model's end-of-sequence ids are among them unless the client ignores them."""
    masked_until_min: tuple[TokenId, ...] = ()
    """Ids that `min_tokens` suppresses: the stop ids, and end-of-sequence even where it is ignored as a stop."""
    pooling: Literal["", "last", "mean", "cls"] = ""
    """Whether one vector of the prompt is wanted, from the hidden states that its last, all or its first token end with. The
    sampled token is not."""
    second_text_at: int = 0
    """Where in a prompt that is a pair of texts the second begins, for models that tell them apart. 0 means nowhere."""
    thinking: ThinkingBudget | None = None
    grammar: Grammar | None = None
    """Goes with at least one id in `stop_token_ids`, by which a complete output ends."""


@dataclass(frozen=True, slots=True)
class PromptScore:
    """How likely a token of the prompt was behind those before it."""

    logprob: float
    rank: int
    """1: the likeliest."""
    top: tuple[tuple[TokenId, float], ...] = ()
    """Likeliest tokens and their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHints:
    """What a client says of the time after a request. No answer depends on it. An instance follows it as far as its tenant's room
    goes."""

    session: str = ""
    """Names the conversation that the request is a turn of, among its tenant's; empty: it is of none."""
    ttl_s: float = 0.0
    """For so long after its end its KV is not given up for that of others who have not asked for this."""
    prefetch_s: float | None = None
    """So long after its end its KV is read back to the device, if lower tiers alone have it by then. None: before the session's
    next turn as its past lets expect; infinite: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. `attempt` counts re-executions; `emitted` are tokens that earlier attempts delivered."""

    id: str
    prompt: tuple[TokenId, ...]
    sampling: SamplingParams
    reply_to: str
    """Address of the frontend that the tokens go to."""
    slo: Slo = Slo()
    salt: str = ""
    """Prefixes are shared only between equal salts."""
    adapter: str = ""
    """The adapter that changes the model for it, by name and revision (`core.config.adapter_config`); empty: the model as it
    is."""
    arrival_at: float = 0.0
    attempt: int = 0
    emitted: tuple[TokenId, ...] = ()
    tenant: str = ""
    """The tenant, from the configuration's `tenants`; empty where the request belongs to none."""
    weight: float = 1.0
    """Its tenant's share of the service while other tenants wait as well, relative to theirs."""
    retain: bool = True
    """Whether its KV may be wanted again. False: its blocks are the first that the prefix cache gives up."""
    sibling: str = ""
    """The key of a request with the same beginning, which had its KV where this one goes; empty: there is none."""
    images: tuple[PromptImage, ...] = ()
    """The images of the prompt, in order."""
    hints: CacheHints = CacheHints()
    resumption: "Resumption | None" = None
    """None: it ends with the connection of its client."""

    @property
    def key(self) -> str:
        """Names this attempt on every worker; two attempts of one request never share state."""
        return f"{self.id}#{self.attempt}"

    @property
    def prefix_salt(self) -> str:
        """What KV depends on beside the tokens: prefixes are shared only where it is equal. A salt begins with no line break."""
        return f"\n{self.adapter}\n{self.salt}" if self.adapter else self.salt

    @property
    def reuses_prefix(self) -> bool:
        """False while something of each token of the prompt is wanted that only computing it gives: caches have KV alone."""
        needs_all = self.sampling.num_prompt_logprobs >= 0 or self.sampling.pooling in ("mean", "cls")
        return not needs_all or bool(self.emitted)

    @property
    def tokens(self) -> tuple[TokenId, ...]:
        """All tokens whose KV must exist before the next one can be sampled, those of images by their names."""
        prompt = with_names(self.prompt, self.images) if self.images else self.prompt
        return prompt + self.emitted

    def retry(self, emitted: tuple[TokenId, ...]) -> "Request":
        """Return the next attempt, which continues after `emitted` (all output tokens delivered so far)."""
        return replace(self, attempt=self.attempt + 1, emitted=emitted, sibling="")


@dataclass(frozen=True, slots=True)
class Route:
    """Where one attempt runs: instance addresses. An empty `prefill` means that `decode` computes the prompt itself."""

    decode: str
    prefill: str = ""


@record(kw_only=True)
class TokenOut:
    """One generated token. `index` counts output tokens from 0 over all attempts: the frontend's deduplication key."""

    request_id: str
    attempt: int
    index: int
    token: TokenId
    logprob: float | None = None
    top: tuple[tuple[TokenId, float], ...] = ()
    """Likeliest tokens and their log-probabilities, likeliest first."""
    finish: FinishReason | None = None
    prompt_scores: tuple[PromptScore, ...] = ()
    """With the first token, where they were asked for: one for each token of the prompt but its first."""
    embedding: bytes = b""
    """With the first token, where it was asked for: hidden_size numbers, float32, little-endian, not normalised."""
    num_cached: int = field(default=0, compare=False)
    """With the first token: how many of the prompt's tokens were not computed for it, since their KV was cached. What is said is
    the same whatever was cached."""

    @property
    def key(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What lets another ingress go on with a request whose client comes back."""

    stream: str
    """Names the answer. All of its sequences have it."""
    owner: str
    """Who may ask for it again."""
    keep_s: float
    """How long its output is kept after its end, and how long it is generated while no frontend reads it."""
    begun_at: int = 0
    """When its client asked, in seconds since 1970: answers say so."""
    digest: bytes = b""
    """The digest of what the client asked."""
    record: bytes = b""
    """What an ingress needs to ask again, where the client does not send it. Instances do not read it."""
    past: tuple[TokenOut, ...] = ()
    """The tokens of `emitted` as they were generated."""
    held_by: str = ""
    """The instance that has this attempt already."""

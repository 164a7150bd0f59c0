"""The bodies that clients send. Every parameter of OpenAI's schema is honoured here, or refused by name.

pydantic is strict: "5" is no number and true is no integer."""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WrapValidator, model_validator

from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, in_pieces, is_one_of
from cluster.ingress.bodies.cache_hints import CacheControl, CacheHintsBody, Retention, with_ttl
from cluster.ingress.bodies.neutral_fields import NEUTRAL, NOTED
from cluster.ingress.bodies.structured import ResponseFormat, StructuredOutputs
from cluster.ingress.bodies.tool_bodies import ToolCalls, ToolChoice, Tools

Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
MAX_STOPS = 64
_MAX_STOP_CHARACTERS = 4096
"""The most characters of all stop strings together: each token's text is compared with all of them."""
TokenNumber = Annotated[int, Field(ge=0)]
# A list ends at its first bad item: a million complaints would hold up everybody's tokens while they are written.
Ids = Annotated[list[TokenNumber], Field(min_length=1, fail_fast=True), WrapValidator(in_pieces)]
Truncation = Annotated[int, Field(ge=-1)]
"""vLLM's field: so many tokens of a prompt are taken; -1 means as many as the model takes."""
MAX_BIASES = 1024
MAX_TEXTS = 2048
"""The most texts of one request for vectors, as with OpenAI."""


def _not_too_many(biases: Any) -> Any:
    """Refuse too many biases before each of them is validated, which takes time."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"{len(biases)} token ids exceed the limit of {MAX_BIASES}")
    return biases


def _not_too_long(stops: list[str]) -> list[str]:
    if (length := sum(map(len, stops))) > _MAX_STOP_CHARACTERS:
        raise ValueError(f"{length} characters together exceed the limit of {_MAX_STOP_CHARACTERS}")
    return stops


Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS), AfterValidator(_not_too_long)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_not_too_many)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's field: each chunk says what has been used up to it."""


class ModelRequest(Strict):
    """The fields of every route that asks the model for something: who answers, when, and with whom prefixes are shared."""

    neutral: ClassVar[NeutralFields] = NEUTRAL
    noted: ClassVar[NeutralFields] = NOTED

    model: str
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    """The service class, where the header x-slo-class names none. `auto` and `default` mean the tenant's own."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """A smaller number goes first, within what the tenant's classes allow."""
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    """Prefixes are shared only among requests of one tenant with equal salts."""


class Common(ModelRequest):
    """What both generation routes take. None means the model's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: (
        Annotated[list[TokenNumber], Field(min_length=1, fail_fast=True, max_length=65536)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=128, fail_fast=True)] | None = None
    """Texts that the answer does not contain."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1)] | None = None
    use_beam_search: bool = False
    """vLLM's: the answers are the likeliest that a search over `n` (or `best_of`) beams finds."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[TokenNumber], Field(fail_fast=True, max_length=1024)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Truncation | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """vLLM's field: how likely each token of the prompt was, and so many of the likeliest."""
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_retention: Retention | None = None
    """With `24h` a prefix is pinned as with `cache_hints.ttl_s`; `in_memory` is how all are kept. `none` is Baton's: no request
    will continue from here, and the cache gives these blocks up first."""
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    """The session, where `cache_hints` name none."""
    cache_hints: CacheHintsBody | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's field, for what OpenAI's `response_format` cannot say."""

    @property
    def is_structured(self) -> bool:
        text = self.response_format is None or self.response_format.type == "text"
        return not text or self.structured_outputs is not None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_everywhere(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def hints(self) -> CacheHintsBody | None:
        """What the body says of the time after it."""
        return self.cache_hints

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class _Part(Strict):
    cache_control: CacheControl | None = None
    """Anthropic's, which LiteLLM and OpenRouter send in chats."""


class TextPart(_Part):
    type: Literal["text"]
    text: str


Detail = Literal["auto", "low", "high", "original"]
"""`low` makes a large picture smaller. With the others a model sees as finely as its processor lets it."""


class ImageUrl(Strict):
    url: str
    detail: Detail | None = None


class ImagePart(_Part):
    type: Literal["image_url"]
    image_url: ImageUrl


def _said(part: Any) -> Any:
    """Return a refusal that an assistant gave as a part, as text."""
    if isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    return part


Part = Annotated[TextPart | ImagePart, Field(discriminator="type"), BeforeValidator(_said)]


class ReasoningDetail(Strict):
    """OpenRouter's and LiteLLM's forms of reasoning. Where it has neither text nor summary, nobody here can read it."""

    neutral: ClassVar[NeutralFields] = dict.fromkeys(
        ("id", "index", "format", "signature", "data"), (anything, "")
    )

    type: str | None = None
    text: str = ""
    summary: str = ""
    thinking: str = ""

    @property
    def thought(self) -> str:
        return self.text or self.thinking or self.summary


class Message(Strict):
    """`content` is null where an assistant only called tools."""

    noted: ClassVar[NeutralFields] = {
        "encrypted_content": (anything, "another server's secret, which the model is not shown")
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1, fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: ToolCalls | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[ReasoningDetail] | None = None
    thinking_blocks: list[ReasoningDetail] | None = None
    refusal: str | None = None
    """The assistant's refusal, which stands instead of content."""
    cache_control: CacheControl | None = None
    # Clients send answers back as they got them, with these fields empty.
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    parsed: Any = Field(default=None, exclude=True)
    """What a client's SDK has parsed from the content, and sends back."""
    provider_specific_fields: Any = Field(default=None, exclude=True)
    """LiteLLM's own, which it sends back."""

    @model_validator(mode="after")
    def _suits_its_role(self) -> "Message":
        if self.role != "assistant":
            if self.content is None:
                raise ValueError("content is required")
            if self.tool_calls or self.thought:
                raise ValueError("only an assistant's message has tool_calls or reasoning")
        if self.role != "user" and self.has_pictures:
            raise ValueError("only a user's message has pictures")
        return self

    @property
    def text(self) -> str | None:
        """The text alone."""
        parts = self.content if self.content is not None else self.refusal
        if not isinstance(parts, list):
            return parts
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    @property
    def thought(self) -> str:
        """The reasoning, under whichever name a server has given it."""
        details = self.reasoning_details or self.thinking_blocks or []
        return self.reasoning_content or self.reasoning or "".join(each.thought for each in details)

    @property
    def cache_controls(self) -> Iterator[CacheControl | None]:
        yield self.cache_control
        if isinstance(self.content, list):
            yield from (part.cache_control for part in self.content)

    @property
    def has_pictures(self) -> bool:
        return isinstance(self.content, list) and any(isinstance(part, ImagePart) for part in self.content)


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatRequest(Common):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """vLLM's field: the answer goes on where the last message, the assistant's, ends."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    """Tokens after which the end of reasoning is forced, as in vLLM."""

    @property
    def hints(self) -> CacheHintsBody | None:
        told = chain.from_iterable(message.cache_controls for message in self.messages)
        declared = chain.from_iterable(tool.cache_controls for tool in self.tools or ())
        return with_ttl(self.cache_hints, chain(told, declared))


Prompts = (
    str
    | Ids
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
)


class RerankDocument(Strict):
    text: str


class CompletionRequest(Common):
    prompt: Prompts
    echo: bool | None = None
    suffix: str | None = None
    """The text that follows the wanted text."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """With 0 the answer has nothing but the prompt, for its log-probabilities."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "suffix": ("",),
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
}
"""Values that change nothing, beside a field's default."""
CHATS_OWN: NeutralFields = {
    name: (is_one_of(each.default, *_HARMLESS.get(name, ())), "it goes with /v1/chat/completions")
    for name, each in {**CompletionRequest.model_fields, **ChatRequest.model_fields}.items()
}
"""What other routes know of these two: a field that would change the answer is not left out."""


class EmbeddingRequest(ModelRequest):
    input: Prompts
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    add_special_tokens: bool = True
    truncate_prompt_tokens: Truncation | None = None


class RerankRequest(ModelRequest):
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True


class ScoreRequest(ModelRequest):
    text_1: str | Annotated[list[str], Field(min_length=1)]
    text_2: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class TokenizeRequest(Strict):
    """A text, or what a chat's prompt is made of."""

    neutral: ClassVar[NeutralFields] = NEUTRAL

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None

    @property
    def as_chat(self) -> ChatRequest:
        own = self.model_fields_set & ChatRequest.model_fields.keys()
        return ChatRequest.model_construct(**{name: getattr(self, name) for name in own})


class DetokenizeRequest(Strict):
    neutral: ClassVar[NeutralFields] = NEUTRAL

    model: str | None = None
    tokens: Annotated[list[TokenNumber], Field(fail_fast=True), WrapValidator(in_pieces)]

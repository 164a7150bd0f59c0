"""The bodies of OpenAI's routes, and vLLM's beside them. Every parameter of OpenAI's schema is honoured, or refused by name."""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WrapValidator, model_validator

from cluster.ingress.bodies import request_fields as fields
from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, in_pieces, is_one_of
from cluster.ingress.bodies.cache_hints import CacheControl, CacheHintsBody, Retention, with_ttl
from cluster.ingress.bodies.neutral_fields import NEUTRAL, NOTED
from cluster.ingress.bodies.structured import ResponseFormat, StructuredOutputs
from cluster.ingress.bodies.tool_bodies import ToolCalls, ToolChoice, Tools
from cluster.ingress.requests import conversation
from cluster.ingress.requests.generation_request import Terms


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
    service_tier: fields.ServiceTier | None = None
    """The service class, where the header x-slo-class names none. `auto` and `default` mean the tenant's own."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """A smaller number goes first, within what the tenant's classes allow."""
    cache_salt: fields.CacheSalt = ""
    """Prefixes are shared only among requests of one tenant with equal salts."""

    @property
    def terms(self) -> Terms:
        return Terms(self.model, self.service_tier, self.priority, self.cache_salt)


class Common(ModelRequest):
    """What both generation routes take. None means the model's default."""

    temperature: fields.Temperature | None = None
    top_p: fields.Probability | None = None
    top_k: fields.TopK | None = None
    min_p: fields.MinP | None = None
    repetition_penalty: fields.RepetitionPenalty | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    seed: fields.Seed | None = None
    logit_bias: fields.Biases | None = None
    allowed_token_ids: (
        Annotated[list[fields.TokenNumber], Field(min_length=1, fail_fast=True, max_length=65536)] | None
    ) = None
    bad_words: Annotated[list[fields.BadWord], Field(max_length=128, fail_fast=True)] | None = None
    """Texts that the answer does not contain."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1)] | None = None
    use_beam_search: bool = False
    """vLLM's: the answers are the likeliest that a search over `n` (or `best_of`) beams finds."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    stop: fields.Stop | fields.Stops | None = None
    stop_token_ids: Annotated[list[fields.TokenNumber], Field(fail_fast=True, max_length=1024)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: fields.Truncation | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """vLLM's field: how likely each token of the prompt was, and so many of the likeliest."""
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_retention: Retention | None = None
    """With `24h` a prefix is pinned as with `cache_hints.ttl_s`; `in_memory` is how all are kept. `none` is Baton's: no request
    will continue from here, and the cache gives these blocks up first."""
    prompt_cache_key: fields.CacheKey | None = None
    """The session, where `cache_hints` name none."""
    cache_hints: CacheHintsBody | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """vLLM's field, for what OpenAI's `response_format` cannot say."""

    @property
    def hints(self) -> CacheHintsBody | None:
        """What the body says of the time after it."""
        return self.cache_hints


class _Part(Strict):
    cache_control: CacheControl | None = None
    """Anthropic's, which LiteLLM and OpenRouter send in chats."""


class TextPart(_Part):
    type: Literal["text"]
    text: str

    def part(self, place: str) -> conversation.Part:
        return conversation.MessageText(self.text)


class ImageUrl(Strict):
    url: str
    detail: fields.Detail | None = None


class ImagePart(_Part):
    type: Literal["image_url"]
    image_url: ImageUrl

    def part(self, place: str) -> conversation.Part:
        url, is_small = self.image_url.url, self.image_url.detail == "low"
        return conversation.MessageImage(url, f"{place}.image_url.url", is_small)


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
        return self

    def message(self, place: str) -> conversation.ChatMessage:
        content = self.refusal if self.content is None else self.content
        if isinstance(content, list):
            parts = [part.part(f"{place}.content[{at}]") for at, part in enumerate(content)]
            content = conversation.content_of(parts)
        return conversation.ChatMessage(
            role=self.role,
            content=content or "",
            name=self.name,
            reasoning=self.thought,
            calls=tuple(call.call for call in self.tool_calls or ()),
            call_id=self.tool_call_id,
            place=place,
        )

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
    reasoning_effort: fields.Effort | None = None
    thinking_token_budget: fields.ThinkingTokens | None = None

    @property
    def hints(self) -> CacheHintsBody | None:
        told = chain.from_iterable(message.cache_controls for message in self.messages)
        declared = chain.from_iterable(tool.cache_controls for tool in self.tools or ())
        return with_ttl(self.cache_hints, chain(told, declared))


class RerankDocument(Strict):
    text: str


class CompletionRequest(Common):
    prompt: fields.Prompts
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
    input: fields.Prompts
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    add_special_tokens: bool = True
    truncate_prompt_tokens: fields.Truncation | None = None


class RerankRequest(ModelRequest):
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=fields.MAX_TEXTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True


class ScoreRequest(ModelRequest):
    text_1: str | Annotated[list[str], Field(min_length=1)]
    text_2: str | Annotated[list[str], Field(min_length=1, max_length=fields.MAX_TEXTS)]


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
    tokens: Annotated[list[fields.TokenNumber], Field(fail_fast=True), WrapValidator(in_pieces)]

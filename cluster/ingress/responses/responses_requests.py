"""Bodies of OpenAI's /v1/responses and the requests that they stand for. Each parameter is honoured or refused by name."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from cluster.ingress.bodies import request_fields as fields
from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, is_one_of, note
from cluster.ingress.bodies.cache_hints import CacheHintsBody, Retention, hints_of
from cluster.ingress.bodies.json_schema import Schema, without_nulls
from cluster.ingress.bodies.neutral_fields import NEUTRAL, NOTED
from cluster.ingress.bodies.structured import FormatName, ObjectFormat, TextFormat, form_of, json_form
from cluster.ingress.bodies.tool_bodies import MAX_NAME, MAX_TOOLS, FunctionName, own_tools
from cluster.ingress.openai.request_bodies import CHATS_OWN
from cluster.ingress.requests.conversation import (
    CallChoice,
    ChatConversation,
    ChatMessage,
    DeclaredTool,
    content_of,
    only_named,
)
from cluster.ingress.requests.generation_request import AnswerForm, GenerationRequest, Terms
from cluster.ingress.responses.responses_items import (
    MAX_ITEMS,
    CallOutputItem,
    InputItem,
    MessageItem,
    PlacedItem,
    joined_name,
)
from core.errors import RequestError

Json = dict[str, Any]


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct", "programmatic"]] | None = None
    defer_loading: bool | None = None
    """It changes nothing: a tool is shown from the beginning, so that the prefix of the prompt stays the same."""
    output_schema: Json | None = None
    """The form of the tool's result. The model's template has no place for it."""


class NamespaceTool(Strict):
    """Functions under a common name, as Codex sends those of an MCP server."""

    type: Literal["namespace"]
    name: FunctionName
    description: str = ""
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


def _tool_kind(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return {"function": "FunctionTool", "namespace": "NamespaceTool"}.get(str(kind))


# The tags are no values of `type`, so that a complaint does not take them for the names of fields.
Tool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[NamespaceTool, Tag("NamespaceTool")],
    Discriminator(
        _tool_kind,
        custom_error_type="unknown_tool",
        custom_error_message="a tool's type must be 'function' or 'namespace'",
    ),
]


class NamedFunction(Strict):
    type: Literal["function"]
    name: FunctionName


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(max_length=MAX_TOOLS), BeforeValidator(own_tools)]


class SchemaText(Strict):
    type: Literal["json_schema"]
    name: Annotated[FormatName, WithJsonSchema({"type": "string"})]
    schema_: Annotated[Schema, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    format: Annotated[TextFormat | ObjectFormat | SchemaText, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _is_noted(self, info: ValidationInfo) -> "TextConfig":
        if self.verbosity not in (None, "medium"):
            note(info, f"text.verbosity: {NOTED['verbosity'][1]}")
        return self


class ReasoningConfig(Strict):
    effort: fields.Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """It changes nothing: there are no summaries, and the reasoning comes as it is."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


RESPONSES_NEUTRAL: NeutralFields = {
    **CHATS_OWN,
    "max_tokens": (is_one_of(), "it is called max_output_tokens here"),
    "max_completion_tokens": (is_one_of(), "it is called max_output_tokens here"),
    "response_format": (is_one_of(), "it is called text.format here"),
    "reasoning_effort": (is_one_of(), "it is called reasoning.effort here"),
    "verbosity": (is_one_of(), "it is called text.verbosity here"),
    **{name: NEUTRAL[name] for name in ("user", "safety_identifier", "prompt_cache_options", "moderation")},
    "client_metadata": (anything, ""),  # Codex's labels
    "max_tool_calls": (is_one_of(), "the client runs the tools"),
    "stream_options": (
        lambda options: isinstance(options, dict) and not options.get("include_obfuscation"),
        "events carry no padding",
    ),
    "prompt": (is_one_of(), "no prompts are stored here"),
    "context_management": (is_one_of([]), "the client shortens its history"),
    "background_options": (is_one_of(), "a background response runs as any other"),
    "image": (is_one_of(), "only text is generated"),
    "access_programs": (is_one_of(), "there are none"),
}
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ConversationParam(Strict):
    id: str


class ResponsesRequest(Strict):
    neutral: ClassVar[NeutralFields] = RESPONSES_NEUTRAL

    model: str
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[fields.Temperature | None, fields.ANY_NUMBER] = None
    top_p: Annotated[fields.Probability | None, fields.ANY_NUMBER] = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: (
        Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), BeforeValidator(own_tools)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """With `auto` the oldest turns are left out where the conversation is too long."""
    conversation: str | ConversationParam | None = None
    """The stored conversation that this is a turn of. The items of both sides become part of it."""
    include: list[Includable] | None = None
    """Only log-probabilities can be left out: reasoning comes as it is, and OpenAI's own tools are not run."""
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    service_tier: Annotated[fields.ServiceTier | None, fields.ANY_TEXT] = None
    prompt_cache_retention: Annotated[Retention | None, fields.ANY_VALUE] = None
    prompt_cache_key: Annotated[fields.CacheKey | None, fields.ANY_VALUE] = None
    cache_hints: CacheHintsBody | None = None
    # vLLM's, as in chats.
    top_k: Annotated[fields.TopK | None, fields.ANY_VALUE] = None
    min_p: Annotated[fields.MinP | None, fields.ANY_VALUE] = None
    seed: Annotated[fields.Seed | None, fields.ANY_VALUE] = None
    stop: Annotated[fields.Stop | fields.Stops | None, fields.ANY_VALUE] = None
    presence_penalty: Annotated[fields.Penalty | None, fields.ANY_VALUE] = None
    frequency_penalty: Annotated[fields.Penalty | None, fields.ANY_VALUE] = None
    repetition_penalty: Annotated[fields.RepetitionPenalty | None, fields.ANY_VALUE] = None
    ignore_eos: Annotated[bool | None, fields.ANY_VALUE] = None
    cache_salt: Annotated[fields.CacheSalt | None, fields.ANY_VALUE] = None
    chat_template_kwargs: Annotated[Json | None, fields.ANY_VALUE] = None
    thinking_token_budget: Annotated[fields.ThinkingTokens | None, fields.ANY_VALUE] = None

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """By the name that the model knows, the namespace and the name in it."""
        spaces = (tool for tool in self.tools or () if isinstance(tool, NamespaceTool))
        return {joined_name(s.name, one.name): (s.name, one.name) for s in spaces for one in s.tools}

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationParam) else self.conversation

    @property
    def is_kept(self) -> bool:
        return self.store is not False


def input_items(body: ResponsesRequest) -> list[InputItem]:
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return list(body.input)


def conversation_of(body: ResponsesRequest, items: Sequence[PlacedItem]) -> ChatConversation:
    """Return what a response's prompt is made of. `items` is the whole conversation. Raises RequestError."""
    told = body.instructions
    head = [] if told is None else [ChatMessage(role="system", content=told, place="instructions")]
    tools = tuple(_tools(body))
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools: {len(tools)} functions exceed the limit of {MAX_TOOLS}", field="tools")
    if isinstance(body.tool_choice, AllowedTools):
        tools = only_named(tools, [tool.name for tool in body.tool_choice.tools])
    return ChatConversation(
        messages=[*head, *_messages(items)],
        tools=tools,
        tool_choice=_choice(body),
        effort=None if body.reasoning is None else body.reasoning.effort,
        template_arguments=body.chat_template_kwargs or {},
    )


def generation_of(body: ResponsesRequest) -> GenerationRequest:
    """Return how the answer is generated. Raises RequestError."""
    hints, retain = hints_of(body.cache_hints, body.prompt_cache_key, body.prompt_cache_retention)
    return GenerationRequest(
        terms=Terms(body.model, body.service_tier, cache_salt=body.cache_salt or ""),
        prompt_field="input",
        max_tokens=body.max_output_tokens,
        sampling=fields.sampling_of(body),
        seed=body.seed,
        stops=fields.as_tuple(body.stop),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else -1,
        stream=bool(body.stream),
        thinking_tokens=body.thinking_token_budget,
        form=_form(body.text),
        hints=hints,
        retain=retain,
    )


def _messages(items: Sequence[PlacedItem]) -> Iterator[ChatMessage]:
    """Yield the messages. Reasoning, text and calls that follow each other are one message of the assistant. Behind calls'
    results their images are a user's message."""
    converted = [(placed.message, placed) for placed in items]
    for role, group in groupby(converted, lambda pair: pair[0].role):
        pairs = list(group)
        messages = [message for message, _ in pairs]
        yield from [_one_turn(messages)] if role == "assistant" else messages
        images = [
            part
            for _, placed in pairs
            if isinstance(placed.item, CallOutputItem)
            for part in placed.item.images(placed.place)
        ]
        if images:
            yield ChatMessage(role="user", content=content_of(images), place=pairs[-1][0].place)


def _one_turn(messages: Sequence[ChatMessage]) -> ChatMessage:
    return replace(
        messages[0],
        content="".join(message.text for message in messages),
        reasoning="".join(message.reasoning for message in messages),
        calls=tuple(call for message in messages for call in message.calls),
    )


def _tools(body: ResponsesRequest) -> Iterator[DeclaredTool]:
    """Yield the functions. What a namespace is described as stands before its first one's description. Raises RequestError."""
    for tool in body.tools or ():
        if isinstance(tool, FunctionTool):
            yield _tool(tool, tool.name, tool.description)
            continue
        for number, inner in enumerate(tool.tools):
            described = [*([] if number else [tool.description]), inner.description or ""]
            name = joined_name(tool.name, inner.name)
            if len(name) > MAX_NAME:
                raise RequestError(f"tools: {name!r} has more than {MAX_NAME} characters", field="tools")
            yield _tool(inner, name, "\n".join(filter(None, described)))


def _tool(tool: FunctionTool, name: str, description: str | None) -> DeclaredTool:
    parameters = None if tool.parameters is None else without_nulls(tool.parameters)
    return DeclaredTool(name, description, parameters, tool.strict)


def _choice(body: ResponsesRequest) -> CallChoice:
    parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case NamedFunction(name=name):
            return CallChoice("required", name, parallel)
        case AllowedTools(mode=mode):
            return CallChoice(mode, "", parallel)
        case mode:
            return CallChoice(mode or "auto", "", parallel)


def _form(text: TextConfig | None) -> AnswerForm | None:
    asked = text and text.format
    if isinstance(asked, SchemaText):
        return json_form("text.format", asked.schema_, strict=asked.strict is True)
    return form_of(asked, None, field="text.format")

"""Bodies of OpenAI's /v1/responses and the chat requests that they stand for. Each parameter is honoured or refused by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, is_one_of, note, validate
from cluster.ingress.bodies.cache_hints import CacheHintsBody
from cluster.ingress.bodies.json_schema import Schema
from cluster.ingress.bodies.neutral_fields import NEUTRAL, NOTED
from cluster.ingress.bodies.request_bodies import CHATS_OWN, ChatRequest
from cluster.ingress.bodies.structured import ObjectFormat, TextFormat
from cluster.ingress.bodies.tool_bodies import MAX_TOOLS, FunctionName, own_tools
from cluster.ingress.responses.responses_items import (
    MAX_ITEMS,
    CallItem,
    CallOutputItem,
    CompactionItem,
    ContentPart,
    InputItem,
    Item,
    MessageItem,
    ReasoningItem,
    joined_name,
)

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
    name: str
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
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
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
    temperature: float | None = None
    top_p: float | None = None
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
    service_tier: str | None = None
    prompt_cache_retention: Any = None
    prompt_cache_key: Any = None
    cache_hints: CacheHintsBody | None = None
    # vLLM's, as in chat requests, which check them and those above.
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    ignore_eos: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None
    thinking_token_budget: Any = None

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


_SUMMARY = "This is a summary of the conversation so far:"
_AS_IN_CHAT = (
    *(
        "model",
        "stream",
        "temperature",
        "top_p",
        "parallel_tool_calls",
        "service_tier",
        "prompt_cache_retention",
        "prompt_cache_key",
        "cache_hints",
    ),
    *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("ignore_eos", "cache_salt", "chat_template_kwargs", "thinking_token_budget"),
)


def input_items(body: ResponsesRequest) -> list[InputItem]:
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return list(body.input)


def chat_of(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """Return the chat request. `items` is the whole conversation. Raises RequestError."""
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    chat: Json = {name: getattr(body, name) for name in _AS_IN_CHAT}
    chat |= {"messages": messages + _messages(items), **_tools(body)}
    chat |= {"max_completion_tokens": body.max_output_tokens, **_format(body.text)}
    if body.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    return validate(ChatRequest, chat)


def _messages(items: Sequence[Item]) -> list[Json]:
    """Return the messages. Reasoning, text and calls that follow each other are one message of the assistant."""
    out: list[Json] = []
    turn: Json | None = None
    for item in _with_shown(items):
        if isinstance(item, CallOutputItem):
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
        elif isinstance(item, CompactionItem):
            out.append({"role": "user", "content": f"{_SUMMARY}\n{item.summary}"})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            out.append({"role": item.role, "content": item.in_chat})
        else:
            if turn is None or out[-1] is not turn:
                turn = {"role": "assistant", "content": None}
                out.append(turn)
            _say(turn, item)
    return out


def _with_shown(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items. Behind calls' results their pictures are a user's message, since templates show none in results."""
    pictures: list[ContentPart] = []
    for item in items:
        if pictures and not isinstance(item, CallOutputItem):
            yield MessageItem(role="user", content=pictures)
            pictures = []
        yield item
        if isinstance(item, CallOutputItem):
            pictures += item.pictures
    if pictures:
        yield MessageItem(role="user", content=pictures)


def _say(turn: Json, item: MessageItem | CallItem | ReasoningItem) -> None:
    match item:
        case MessageItem():
            turn["content"] = (turn["content"] or "") + item.text
        case CallItem():
            function = {"name": joined_name(item.namespace, item.name), "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        case ReasoningItem():
            if item.text:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text


def _tools(body: ResponsesRequest) -> Mapping[str, Any]:
    choice: Any = body.tool_choice
    match choice:
        case AllowedTools(mode="auto", tools=[]):
            choice = "none"
        case AllowedTools(mode=mode, tools=allowed):
            subset = {"mode": mode, "tools": [_named(one) for one in allowed]}
            choice = {"type": "allowed_tools", "allowed_tools": subset}
        case NamedFunction():
            choice = _named(choice)
        case _:
            pass
    declared = [{"type": "function", "function": function} for function in _functions(body)]
    return {"tools": declared or None, "tool_choice": choice}


def _functions(body: ResponsesRequest) -> Iterator[Json]:
    """Yield the functions. What a namespace is described as stands before its first one's description."""
    for tool in body.tools or ():
        if isinstance(tool, FunctionTool):
            yield _function(tool)
            continue
        for number, inner in enumerate(tool.tools):
            described = [*([] if number else [tool.description]), inner.description or ""]
            yield _function(inner) | {
                "name": joined_name(tool.name, inner.name),
                "description": "\n".join(filter(None, described)),
            }


def _function(tool: FunctionTool) -> Json:
    return {field: getattr(tool, field) for field in ("name", "description", "parameters", "strict")}


def _named(function: NamedFunction) -> Json:
    return {"type": "function", "function": {"name": function.name}}


def _format(text: TextConfig | None) -> Mapping[str, Any]:
    match text and text.format:
        case ObjectFormat():
            return {"response_format": {"type": "json_object"}}
        case SchemaText(name=name, schema_=schema, strict=strict):
            named = {"name": name, "schema": schema, "strict": strict}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        case _:
            return {}

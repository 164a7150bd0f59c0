"""Bodies of Anthropic's /v1/messages and the requests that they stand for. Each parameter is honoured or refused by name."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from cluster.ingress.anthropic.anthropic_blocks import (
    Block,
    CachedBlock,
    Shown,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    shown,
    text_of,
)
from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, is_one_of
from cluster.ingress.bodies.cache_hints import CacheControl, CacheHintsBody, hints_of, with_ttl
from cluster.ingress.bodies.json_schema import Schema
from cluster.ingress.bodies.neutral_fields import NEUTRAL
from cluster.ingress.bodies.request_fields import Stops, sampling_of
from cluster.ingress.bodies.structured import json_form
from cluster.ingress.bodies.tool_bodies import MAX_TOOLS, FunctionName, without_tools
from cluster.ingress.openai.request_bodies import CHATS_OWN
from cluster.ingress.requests.conversation import (
    CallChoice,
    ChatConversation,
    ChatMessage,
    DeclaredTool,
    MessageCall,
    MessageImage,
    MessageText,
    Part,
    content_of,
)
from cluster.ingress.requests.generation_request import GenerationRequest, Terms
from core.errors import RequestError

Json = dict[str, Any]


_TYPES = {
    "user": {"text", "image", "document", "search_result", "tool_result"},
    "assistant": {"text", "thinking", "redacted_thinking", "tool_use"},
    "system": {"text"},
}


class MessageParam(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1, fail_fast=True)]

    @model_validator(mode="after")
    def _suits_its_role(self) -> "MessageParam":
        for block in self.content if isinstance(self.content, list) else ():
            if block.type not in _TYPES[self.role]:
                raise ValueError(f"no {self.role} message has a block {block.type!r}")
        return self


class ToolParam(CachedBlock):
    name: FunctionName
    description: str | None = None
    input_schema: Schema
    input_examples: list[Json] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """It changes nothing, since arguments are always streamed as they come."""
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    """It changes nothing: a tool is shown from the beginning, so that the prefix of the prompt stays the same."""

    @field_validator("allowed_callers")
    @classmethod
    def _is_called_by_the_model(cls, callers: list[str] | None) -> list[str] | None:
        if callers is not None and "direct" not in callers:
            raise ValueError("without 'direct' the model could not call it, and no code is run here")
        return callers

    @property
    def described(self) -> str | None:
        """The description, with the examples: templates have no place of their own for them."""
        if not self.input_examples:
            return self.description
        examples = (json.dumps(example, ensure_ascii=False) for example in self.input_examples)
        return "\n".join([self.description or "", "Examples of arguments:", *examples]).lstrip()


def _is_servers_own(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and re.fullmatch(r"[a-z_0-9]+_20\d{6}|mcp_toolset", kind) is not None


def _own_tools(tools: Any, info: ValidationInfo) -> Any:
    return without_tools(tools, _is_servers_own, info)


ToolParams = Annotated[
    list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True), BeforeValidator(_own_tools)
]


class ToolChoiceParam(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted"] | None = None
    """With `omitted` the answer has no thinking blocks. There are no summaries: the reasoning comes as it is."""


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(Strict):
    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


def _keeps_everything(value: Any) -> bool:
    """Return whether edits of the history, where there are any, leave it as it was sent."""
    edits: Any = value.get("edits", []) if isinstance(value, dict) else [] if value is None else [value]
    return edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}])


MESSAGES_NEUTRAL: NeutralFields = {
    **CHATS_OWN,
    "stop": (is_one_of([]), "it is called stop_sequences here"),
    "reasoning_effort": (is_one_of(), "it is called output_config.effort here"),
    "response_format": (is_one_of(), "it is called output_config.format here"),
    "metadata": NEUTRAL["metadata"],
    "cache_control": (anything, ""),
    "service_tier": (is_one_of("auto", "standard_only"), "classes are chosen by the header x-slo-class"),
    "speed": (is_one_of("standard"), "there is one speed"),
    "container": (is_one_of(), "there are no containers"),
    "mcp_servers": (is_one_of([]), "the client runs the tools"),
    "inference_geo": (is_one_of(), "the cluster is where it is"),
    "context_management": (_keeps_everything, "the client edits its history"),
    "diagnostics": (is_one_of(), "/cluster and the metrics tell what happened"),
    "user_profile_id": (is_one_of(), "there are no profiles"),
    "workspace_id": (is_one_of(), "a key says which tenant asks"),
    "compaction": (is_one_of(), "the client shortens its history"),
    "fallbacks": (is_one_of([]), "there is one model"),
    "fallback_credit_token": (anything, ""),
    "billing_policy": (anything, ""),
    "betas": (anything, ""),
}


class CountTokensRequest(Strict):
    neutral: ClassVar[NeutralFields] = MESSAGES_NEUTRAL

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    system: str | list[TextBlock] | None = None
    tools: ToolParams | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    thread: Any = None
    """A conversation that the server would keep. It is refused as SDKs expect, which then send the whole conversation."""

    @property
    def shows_thinking(self) -> bool:
        thinking = self.thinking
        return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    cache_control: CacheControl | None = None
    cache_hints: CacheHintsBody | None = None

    @property
    def cache_controls(self) -> Iterator[CacheControl | None]:
        """Everything that says how long KV is to stay."""
        yield self.cache_control
        blocks: list[CachedBlock] = [*self.tools] if self.tools else []
        for text in (self.system, *(message.content for message in self.messages)):
            blocks += [block for block in text or () if isinstance(block, CachedBlock)]
        for block in blocks:
            yield block.cache_control
            if isinstance(block, ToolResultBlock):
                yield from (part.cache_control for part in block.content if isinstance(part, CachedBlock))


def conversation_of(body: CountTokensRequest) -> ChatConversation:
    """Return what a message's prompt is made of. Raises RequestError."""
    if body.thread is not None:
        raise RequestError(
            "thread: this server keeps no conversations; send the whole one without it",
            field="thread",
            code="thread_unsupported_request",
        )
    system = body.system
    messages = [] if system is None else [ChatMessage(role="system", content=_text(system), place="system")]
    for at, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{at}]")
    goes_on = body.messages[-1].role == "assistant"
    return ChatConversation(
        messages=messages,
        tools=tuple(
            DeclaredTool(tool.name, tool.described, tool.input_schema, tool.strict)
            for tool in body.tools or ()
        ),
        tool_choice=_choice(body),
        effort=next(_efforts(body), None),
        begins_answer=not goes_on,
        goes_on_by=f"messages[{len(body.messages) - 1}]" if goes_on else "",
    )


def generation_of(body: MessagesRequest, *, bounds_reasoning: bool) -> GenerationRequest:
    """Return how the answer is generated. `bounds_reasoning`: the model's reasoning can have a budget. Raises RequestError."""
    form = None if body.output_config is None else body.output_config.format
    hints, retain = hints_of(with_ttl(body.cache_hints, body.cache_controls), None, None)
    return GenerationRequest(
        terms=Terms(body.model),
        prompt_field="messages",
        max_tokens=body.max_tokens,
        sampling=sampling_of(body),
        stops=tuple(body.stop_sequences or ()),
        stream=bool(body.stream),
        thinking_tokens=body.thinking.budget_tokens
        if body.thinking is not None and bounds_reasoning
        else None,
        form=None if form is None else json_form("output_config.format", form.schema_, strict=True),
        hints=hints,
        retain=retain,
    )


def _efforts(body: CountTokensRequest) -> Iterator[str]:
    """The efforts that the body asks for, the strongest wish first."""
    if body.thinking is not None and body.thinking.type == "disabled":
        yield "none"
    if body.output_config is not None and body.output_config.effort is not None:
        yield body.output_config.effort


def _messages(message: MessageParam, place: str) -> Iterator[ChatMessage]:
    """Yield the messages. Tools' results are messages of their own, in front of the user's text. Templates show no image in
    them, so the user shows it."""
    blocks = message.content
    if isinstance(blocks, str):
        yield ChatMessage(role=message.role, content=blocks, place=place)
    elif message.role == "assistant":
        yield ChatMessage(
            role="assistant",
            content=text_of(blocks),
            reasoning="".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)),
            calls=tuple(
                MessageCall(block.id, block.name, json.dumps(block.input))
                for block in blocks
                if isinstance(block, ToolUseBlock)
            ),
            place=place,
        )
    else:
        parts: list[Part] = []
        for at, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                yield ChatMessage(role="tool", content=block.text, call_id=block.tool_use_id, place=place)
                parts += [_part(one, f"{place}.content[{at}]") for one in block.images]
        for at, block in enumerate(blocks):
            parts += [_part(one, f"{place}.content[{at}]") for one in shown([block])]
        if parts:
            yield ChatMessage(role=message.role, content=content_of(parts), place=place)


def _part(block: Shown, place: str) -> Part:
    return (
        MessageText(block.text)
        if isinstance(block, TextBlock)
        else MessageImage(block.source.whole_url, place)
    )


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else text_of(content)


def _choice(body: CountTokensRequest) -> CallChoice:
    """Return which tools may be called. Raises RequestError."""
    choice = body.tool_choice
    if choice is None:
        return CallChoice()
    if choice.type in ("any", "tool") and not body.tools:
        raise RequestError(f"tool_choice is {choice.type!r}, but there are no tools", field="tool_choice")
    if choice.type == "tool" and choice.name is None:
        raise RequestError("tool_choice.name is required", field="tool_choice")
    parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "tool":
            return CallChoice("required", choice.name or "", parallel)
        case "any":
            return CallChoice("required", "", parallel)
        case mode:
            return CallChoice(mode, "", parallel)

"""Bodies of Anthropic's /v1/messages and the chat requests that they stand for. Each parameter is honoured or refused by name."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cluster.ingress.api.cache_hints import ttl_of
from cluster.ingress.api.openai_requests import (
    NEUTRAL,
    ChatRequest,
    Neutral,
    Stops,
    anything,
    is_one_of,
    validate,
)
from cluster.ingress.api.openai_tools import MAX_TOOLS, FunctionName, Strict
from core.errors import RequestError

Json = dict[str, Any]


class _Block(Strict):
    cache_control: Json | None = None
    """How long the KV up to here is to stay. The longest time of a body's is that of all its KV."""


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: None = None


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def whole_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Strict):
    type: Literal["url"]
    url: str

    @property
    def whole_url(self) -> str:
        return self.url


class ImageBlock(_Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    """`file` is refused: Baton keeps no uploads for messages."""


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class DirectCaller(Strict):
    type: Literal["direct"]


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: Json
    caller: DirectCaller | None = None


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] = ""
    is_error: bool | None = None

    @property
    def pictures(self) -> list[ImageBlock]:
        return [part for part in self.content if isinstance(part, ImageBlock)]


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
_TYPES = {
    "user": {"text", "image", "tool_result"},
    "assistant": {"text", "thinking", "tool_use"},
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


class ToolParam(_Block):
    name: FunctionName
    description: str | None = None
    input_schema: Json
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """It changes nothing, since arguments are always streamed as they come."""
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


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
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Strict):
    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(Strict):
    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

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
    cache_control: Json | None = None
    cache_hints: Any = None
    """As in chat requests, which check them."""

    @property
    def cache_controls(self) -> Iterator[Json | None]:
        """Everything that says how long KV is to stay."""
        yield self.cache_control
        blocks: list[_Block] = [*self.tools] if self.tools else []
        for text in (self.system, *(message.content for message in self.messages)):
            blocks += [block for block in text or () if isinstance(block, _Block)]
        for block in blocks:
            yield block.cache_control
            if isinstance(block, ToolResultBlock):
                yield from (part.cache_control for part in block.content if isinstance(part, _Block))


def _keeps_everything(value: Any) -> bool:
    """Return whether edits of the history, where there are any, leave it as it was sent."""
    edits: Any = value.get("edits", []) if isinstance(value, dict) else [] if value is None else [value]
    return edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}])


MESSAGES_NEUTRAL: dict[str, tuple[Neutral, str]] = {
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
    "workspace_id": (is_one_of(), "tenants are told by their keys"),
}


def as_chat(body: CountTokensRequest, *, reasons: bool, knows_effort: Callable[[str], bool]) -> ChatRequest:
    """Return the chat request that the message stands for. `reasons` says that the model's format has reasoning, `knows_effort`
    whether its template knows an effort; `none` is that of thinking that is disabled. Raises RequestError."""
    messages = [] if body.system is None else [{"role": "system", "content": _text(body.system)}]
    for message in body.messages:
        messages += _chat_messages(message)
    chat: Json = {"model": body.model, "messages": messages, "tools": _tools(body.tools), **_choice(body)}
    if body.messages[-1].role == "assistant":
        chat["continue_final_message"] = True
    if body.thinking is not None and reasons:
        chat["thinking_token_budget"] = body.thinking.budget_tokens
    chat["reasoning_effort"] = next(filter(knows_effort, _efforts(body)), None)
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences, "stream": body.stream}
        chat |= {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        chat["cache_hints"] = _hints(body)
    return validate(ChatRequest, {name: value for name, value in chat.items() if value is not None})


def _hints(body: MessagesRequest) -> Any:
    """Return Baton's hints, with what Anthropic's say of the time where Baton's say nothing of it. Raises RequestError."""
    hints, ttl_s = body.cache_hints, ttl_of(body.cache_controls)
    if ttl_s is None or not (hints is None or isinstance(hints, dict)):
        return hints
    given: Json = hints or {}
    return given if given.keys() & {"ttl_s", "pin", "release"} else {"ttl_s": ttl_s, **given}


def _efforts(body: CountTokensRequest) -> Iterator[str]:
    """The efforts that the body asks for, the strongest wish first."""
    if body.thinking is not None and body.thinking.type == "disabled":
        yield "none"
    if body.output_config is not None and body.output_config.effort is not None:
        yield body.output_config.effort


def _chat_messages(message: MessageParam) -> list[Json]:
    """Return the messages. Tools' results are messages of their own, in front of the user's text. Templates show no picture in
    them, so the user shows it."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = message.content
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    if message.role != "assistant":
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
            for block in blocks
            if isinstance(block, ToolResultBlock)
        ]
        shown = [one for block in blocks if isinstance(block, ToolResultBlock) for one in block.pictures]
        if shown or any(isinstance(block, ImageBlock) for block in blocks):
            return [*results, {"role": message.role, "content": _parts([*shown, *blocks])}]
        said = any(isinstance(block, TextBlock) for block in blocks)
        return [*results, *([{"role": message.role, "content": text}] if said else [])]
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    out: Json = {"role": "assistant", "content": text or None}
    return [
        out
        | ({"tool_calls": calls} if calls else {})
        | ({"reasoning_content": reasoning} if reasoning else {})
    ]


def _parts(blocks: Sequence[Block]) -> list[Json]:
    """Return what a user says and shows, in order."""
    out: list[Json] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            out.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageBlock):
            out.append({"type": "image_url", "image_url": {"url": block.source.whole_url}})
    return out


def _text(content: str | Sequence[TextBlock | ImageBlock]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content if isinstance(block, TextBlock))


def _tools(tools: Sequence[ToolParam] | None) -> list[Json] | None:
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in tools
    ]


def _choice(body: CountTokensRequest) -> Mapping[str, Any]:
    """Return the choice as chats have it. Raises RequestError."""
    choice = body.tool_choice
    if choice is None:
        return {}
    if choice.type in ("any", "tool") and not body.tools:
        raise RequestError(f"tool_choice is {choice.type!r}, but there are no tools", field="tool_choice")
    if choice.type == "tool" and choice.name is None:
        raise RequestError("tool_choice.name is required", field="tool_choice")
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    match choice.type:
        case "tool":
            return {"tool_choice": {"type": "function", "function": {"name": choice.name}}, **parallel}
        case "any":
            return {"tool_choice": "required", **parallel}
        case _:
            return {"tool_choice": choice.type, **parallel}

"""Bodies of OpenAI's /v1/responses and the chat requests that they stand for. Each parameter is honoured or refused by name."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from cluster.ingress.api.openai_requests import (
    NEUTRAL,
    ChatRequest,
    Detail,
    Neutral,
    anything,
    is_one_of,
    validate,
)
from cluster.ingress.api.openai_tools import MAX_TOOLS, FunctionName, Strict
from cluster.ingress.api.structured import ObjectFormat, Schema, TextFormat

Json = dict[str, Any]
MAX_ITEMS = 4096


class _Item(Strict):
    """An item of the conversation. Clients send items back as they got them, with null for what was not said."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: str
    """`file_id`, which names an upload, is refused."""
    detail: Detail | None = None


class OutputText(Strict):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(default_factory=list)]
    logprobs: list[Any] | None = None


class Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


Part = Annotated[InputText | InputImage | OutputText | Refusal, Field(discriminator="type")]


def _text_of(part: Part) -> str:
    match part:
        case InputImage():
            return ""
        case Refusal(refusal=text) | InputText(text=text) | OutputText(text=text):
            return text


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(_text_of(part) for part in self.content)

    @property
    def in_chat(self) -> str | list[Json]:
        """The content as a chat's message has it: parts where there are pictures, else text."""
        if isinstance(self.content, str) or not any(isinstance(part, InputImage) for part in self.content):
            return self.text
        return [
            {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
            if isinstance(part, InputImage)
            else {"type": "text", "text": _text_of(part)}
            for part in self.content
        ]


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Annotated[InputText | InputImage, Field(discriminator="type")]]

    @property
    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "".join(map(_text_of, self.output))

    @property
    def pictures(self) -> list[Part]:
        return [part for part in self.output if isinstance(part, InputImage)]


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(default_factory=list)]
    content: Annotated[list[ReasoningText], Field(default_factory=list)]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ItemReference(Strict):
    """Stands for an item of a stored response's output."""

    type: Literal["item_reference"] | None = None
    id: str


def _kind(value: Any) -> str | None:
    """Return an item's type, which messages and references may leave out."""
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    return value.get("type") or ("item_reference" if value.keys() <= {"type", "id"} else "message")


_Said = (
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
)
_BY_KIND = Discriminator(
    _kind,
    custom_error_type="unknown_item",
    custom_error_message="items are message, function_call, function_call_output, reasoning and item_reference",
)
Item = Annotated[_Said, _BY_KIND]
InputItem = Annotated[_Said | Annotated[ItemReference, Tag("item_reference")], _BY_KIND]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: Json | None = None
    """The form of the tool's result. The model's template has no place for it."""


class NamedFunction(Strict):
    type: Literal["function"]
    name: FunctionName


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class SchemaText(Strict):
    type: Literal["json_schema"]
    name: str
    schema_: Annotated[Schema, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    format: Annotated[TextFormat | ObjectFormat | SchemaText, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """It changes nothing: there are no summaries, and the reasoning comes as it is."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Strict):
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
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """It changes nothing: reasoning is never encrypted, and comes as it is."""
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    service_tier: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h", "none"] | None = None
    # vLLM's, as in chat requests, which check them.
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
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    @property
    def is_kept(self) -> bool:
        return self.store is not False


RESPONSES_NEUTRAL: dict[str, tuple[Neutral, str]] = {
    **{
        name: NEUTRAL[name]
        for name in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "moderation")
    },
    "client_metadata": (anything, ""),  # Codex's labels
    "truncation": (is_one_of("disabled"), "a conversation that is too long is refused"),
    "max_tool_calls": (is_one_of(), "the client runs the tools"),
    "stream_options": (is_one_of({"include_obfuscation": False}), "events carry no padding"),
    "conversation": (is_one_of(), "name the response that you go on from as previous_response_id"),
    "prompt": (is_one_of(), "no prompts are stored here"),
    "context_management": (is_one_of([]), "the client shortens its history"),
    "background_options": (is_one_of(), "a background response runs as any other"),
    "image": (is_one_of(), "only text is generated"),
    "access_programs": (is_one_of(), "there are none"),
}
_AS_IN_CHAT = (
    *(
        "model",
        "stream",
        "temperature",
        "top_p",
        "parallel_tool_calls",
        "service_tier",
        "prompt_cache_retention",
    ),
    *("top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("ignore_eos", "cache_salt", "chat_template_kwargs", "thinking_token_budget"),
)


def input_items(body: ResponsesRequest) -> list[InputItem]:
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return list(body.input)


def items_of(stored: Sequence[Json]) -> list[Item]:
    """Return a response's output as input items."""
    return _ITEMS.validate_python(stored)


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
    return validate(ChatRequest, {name: value for name, value in chat.items() if value is not None})


def _messages(items: Sequence[Item]) -> list[Json]:
    """Return the messages. Reasoning, text and calls that follow each other are one message of the assistant."""
    out: list[Json] = []
    turn: Json | None = None
    for item in _with_shown(items):
        if isinstance(item, CallOutputItem):
            out.append({"role": "tool", "tool_call_id": item.call_id, "content": item.text})
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
    pictures: list[Part] = []
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
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        case ReasoningItem():
            if item.text:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + item.text


def _tools(body: ResponsesRequest) -> Mapping[str, Any]:
    tools = body.tools or []
    choice: Any = body.tool_choice
    match choice:
        case AllowedTools(mode=mode, tools=allowed):
            subset = {"mode": mode, "tools": [_named(one) for one in allowed]}
            choice = {"type": "allowed_tools", "allowed_tools": subset}
        case NamedFunction():
            choice = _named(choice)
        case _:
            pass
    fields = ("name", "description", "parameters", "strict")
    declared = [{"type": "function", "function": {f: getattr(tool, f) for f in fields}} for tool in tools]
    return {"tools": declared or None, "tool_choice": choice}


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

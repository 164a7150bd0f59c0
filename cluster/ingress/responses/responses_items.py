"""Items of OpenAI's Responses: what a conversation is made of, as clients send it and as it is stored."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cluster.ingress.bodies.body_model import Strict, note
from cluster.ingress.bodies.request_bodies import Detail
from cluster.ingress.bodies.tool_bodies import FunctionName

Json = dict[str, Any]
MAX_ITEMS = 4096


class _Item(Strict):
    """An item of the conversation."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


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


ContentPart = Annotated[InputText | InputImage | OutputText | Refusal, Field(discriminator="type")]


def text_of(part: ContentPart) -> str:
    match part:
        case InputImage():
            return ""
        case Refusal(refusal=text) | InputText(text=text) | OutputText(text=text):
            return text


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(text_of(part) for part in self.content)

    @property
    def in_chat(self) -> str | list[Json]:
        """The content as a chat's message has it: parts where there are pictures, else text."""
        if isinstance(self.content, str) or not any(isinstance(part, InputImage) for part in self.content):
            return self.text
        return [
            {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
            if isinstance(part, InputImage)
            else {"type": "text", "text": text_of(part)}
            for part in self.content
        ]


def joined_name(namespace: str | None, name: str) -> str:
    """Return the one name by which a model knows a function of a namespace."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    namespace: FunctionName | None = None
    name: FunctionName
    arguments: str


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Annotated[InputText | InputImage, Field(discriminator="type")]]

    @property
    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "".join(map(text_of, self.output))

    @property
    def pictures(self) -> list[ContentPart]:
        return [part for part in self.output if isinstance(part, InputImage)]


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(default_factory=list)]
    content: Annotated[list[ReasoningText], Field(default_factory=list)]
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _is_noted(self, info: ValidationInfo) -> "ReasoningItem":
        if self.encrypted_content and not self.content:
            note(info, "encrypted_content: another server's secret, which the model is not shown")
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


_COMPACTED = "baton-summary:"


class CompactionItem(_Item):
    """What /v1/responses/compact made of a conversation. It is the summary itself, encoded and not encrypted."""

    type: Literal["compaction"]
    encrypted_content: str
    created_by: str | None = None

    @field_validator("encrypted_content")
    @classmethod
    def _is_our_own(cls, content: str) -> str:
        if _summary(content) is None:
            raise ValueError("another server's secret: send the conversation itself")
        return content

    @property
    def summary(self) -> str:
        return _summary(self.encrypted_content) or ""


def compacted(summary: str) -> str:
    """Return the content of a compaction."""
    return base64.b64encode((_COMPACTED + summary).encode()).decode()


def _summary(content: str) -> str | None:
    try:
        text = base64.b64decode(content, validate=True).decode()
    except ValueError:
        return None
    return text.removeprefix(_COMPACTED) if text.startswith(_COMPACTED) else None


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
    | Annotated[CompactionItem, Tag("compaction")]
)
_BY_KIND = Discriminator(
    _kind,
    custom_error_type="unknown_item",
    custom_error_message="items are message, function_call, function_call_output, reasoning, compaction and item_reference",
)
Item = Annotated[_Said, _BY_KIND]
InputItem = Annotated[_Said | Annotated[ItemReference, Tag("item_reference")], _BY_KIND]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def items_of(stored: Sequence[Json]) -> list[Item]:
    """Return a response's output as input items."""
    return _ITEMS.validate_python(stored)

"""Items of OpenAI's Responses: what a conversation is made of, as clients send it and as it is stored."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationInfo, field_validator, model_validator

from cluster.ingress.bodies.body_model import Strict, note
from cluster.ingress.bodies.request_fields import Detail
from cluster.ingress.bodies.tool_bodies import FunctionName
from cluster.ingress.requests.conversation import (
    ChatMessage,
    MessageCall,
    MessageImage,
    MessageText,
    Part,
    content_of,
)

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


def _part(part: ContentPart, place: str) -> Part:
    match part:
        case InputImage(image_url=url):
            return MessageImage(url, place, part.detail == "low")
        case Refusal(refusal=text) | InputText(text=text) | OutputText(text=text):
            return MessageText(text)


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]
    phase: Literal["commentary", "final_answer"] | None = None

    def message(self, place: str) -> ChatMessage:
        content = self.content
        if not isinstance(content, str):
            parts = [_part(part, f"{place}.content[{at}].image_url") for at, part in enumerate(content)]
            content = content_of(parts)
        return ChatMessage(role=self.role, content=content, place=place)


def joined_name(namespace: str | None, name: str) -> str:
    """Return the one name by which a model knows a function of a namespace."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    namespace: FunctionName | None = None
    name: FunctionName
    arguments: str

    def message(self, place: str) -> ChatMessage:
        call = MessageCall(self.call_id, joined_name(self.namespace, self.name), self.arguments)
        return ChatMessage(role="assistant", calls=(call,), place=place)


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Annotated[InputText | InputImage, Field(discriminator="type")]]

    def message(self, place: str) -> ChatMessage:
        """Return the message without images: templates show none in results."""
        parts = () if isinstance(self.output, str) else self.output
        text = "".join(part.text for part in parts if isinstance(part, InputText))
        content = self.output if isinstance(self.output, str) else text
        return ChatMessage(role="tool", content=content, call_id=self.call_id, place=place)

    def images(self, place: str) -> list[Part]:
        parts = enumerate(() if isinstance(self.output, str) else self.output)
        return [
            _part(part, f"{place}.output[{at}].image_url")
            for at, part in parts
            if isinstance(part, InputImage)
        ]


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

    def message(self, place: str) -> ChatMessage:
        reasoning = "".join(part.text for part in self.content)
        return ChatMessage(role="assistant", reasoning=reasoning, place=place)


_COMPACTED = "baton-summary:"
_SUMMARY = "This is a summary of the conversation so far:"


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

    def message(self, place: str) -> ChatMessage:
        summary = _summary(self.encrypted_content) or ""
        return ChatMessage(role="user", content=f"{_SUMMARY}\n{summary}", place=place)


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


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An item of a conversation, and the place in the body by which the client named it."""

    item: Item
    place: str

    @property
    def message(self) -> ChatMessage:
        return self.item.message(self.place)


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def items_of(stored: Sequence[Json]) -> list[Item]:
    """Return a response's output as input items."""
    return _ITEMS.validate_python(stored)

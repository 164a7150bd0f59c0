"""A conversation: what a chat's prompt is made of. It was validated where it came in, as the body of one API."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from core.errors import RequestError

Role = Literal["system", "developer", "user", "assistant", "tool"]
_MAX_CALLS = 512


def top_field(place: str) -> str:
    """Return the body's own field that a place in it is in."""
    return place.partition(".")[0].partition("[")[0]


@dataclass(frozen=True, slots=True)
class MessageText:
    text: str


@dataclass(frozen=True, slots=True)
class MessageImage:
    url: str
    place: str = "messages"
    """Where in the body the client wrote it."""
    is_small: bool = False
    """Whether a small version is enough for the client."""


Part = MessageText | MessageImage


@dataclass(frozen=True, slots=True)
class MessageCall:
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: Role
    content: str | tuple[Part, ...] = ""
    """Parts where there are images, else text."""
    name: str | None = None
    reasoning: str = ""
    calls: tuple[MessageCall, ...] = ()
    call_id: str | None = None
    """The call that a tool's message is the result of."""
    place: str = "messages"
    """Where in the body the client wrote it."""

    def __post_init__(self) -> None:
        """Raise RequestError for what no chat template has a place for, or takes too long to render."""
        if self.has_images and self.role != "user":
            why = "only a user's message has images"
        elif len(self.calls) > _MAX_CALLS:
            why = f"{len(self.calls)} calls exceed the limit of {_MAX_CALLS}"
        else:
            return
        raise RequestError(f"{self.place}: {why}", field=top_field(self.place))

    @property
    def text(self) -> str:
        """The text alone."""
        return self.content if isinstance(self.content, str) else _text_of(self.content)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (MessageText(self.content),) if isinstance(self.content, str) else self.content

    @property
    def has_images(self) -> bool:
        return not isinstance(self.content, str)


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """A function that the model may call. None: the client did not say it."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as chat templates render it, with what the client said of it."""
        said = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        given = {name: value for name, value in said.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **given}}


@dataclass(frozen=True, slots=True)
class CallChoice:
    mode: Literal["none", "auto", "required"] = "auto"
    name: str = ""
    """The only tool that may be called; empty: each may."""
    parallel: bool = True
    """Whether an answer may have several calls."""

    @property
    def one_call(self) -> bool:
        return bool(self.name) or not self.parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConversation:
    messages: Sequence[ChatMessage]
    tools: tuple[DeclaredTool, ...] = ()
    tool_choice: CallChoice = CallChoice()
    effort: str | None = None
    """How much reasoning the client asks for; None: it does not say."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    begins_answer: bool = True
    """Whether the prompt ends with what begins an answer."""
    goes_on_by: str = ""
    """The field for which the answer goes on where the last message ends; empty: it is a message of its own."""


def content_of(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    """Return parts as a message's content."""
    has_images = any(isinstance(part, MessageImage) for part in parts)
    return tuple(parts) if has_images else _text_of(parts)


def _text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, MessageText))


def only_named(tools: Sequence[DeclaredTool], names: Collection[str]) -> tuple[DeclaredTool, ...]:
    """Return the tools that `tool_choice` allows. Raises RequestError."""
    if unknown := set(names) - {tool.name for tool in tools}:
        raise RequestError(f"tool_choice allows {min(unknown)!r}, which is no tool", field="tool_choice")
    return tuple(tool for tool in tools if tool.name in names)

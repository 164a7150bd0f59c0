"""The blocks of Anthropic's messages, and the text and images that a model is shown in their place."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, model_validator

from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, note
from cluster.ingress.bodies.cache_hints import CacheControl
from cluster.ingress.bodies.tool_bodies import FunctionName

Json = dict[str, Any]


class CachedBlock(Strict):
    cache_control: CacheControl | None = None
    """How long the KV up to here is to stay. The longest time of a body's is that of all its KV."""


class TextBlock(CachedBlock):
    neutral: ClassVar[NeutralFields] = {"citations": (anything, "")}

    type: Literal["text"]
    text: str


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


class ImageBlock(CachedBlock):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    """`file` is refused: Baton keeps no uploads for messages."""


class NoCitations(Strict):
    """Citations would be part of the answer, which has none here."""

    enabled: Literal[False] = False


class PlainSource(Strict):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Strict):
    type: Literal["content"]
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]]


def _source_kind(source: Any) -> str | None:
    return source.get("type") if isinstance(source, dict) else getattr(source, "type", None)


class DocumentBlock(CachedBlock):
    type: Literal["document"]
    source: Annotated[
        Annotated[PlainSource, Tag("text")] | Annotated[ContentSource, Tag("content")],
        Discriminator(
            _source_kind,
            custom_error_type="unreadable_document",
            custom_error_message="a document's source must be of type 'text' or 'content': no PDF and no upload is read here",
        ),
    ]
    title: str | None = None
    context: str | None = None
    citations: NoCitations | None = None


class SearchResultBlock(CachedBlock):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    citations: NoCitations | None = None


class ToolReferenceBlock(CachedBlock):
    """Names a tool that a search has found. All tools are shown from the beginning, so the name alone is new."""

    type: Literal["tool_reference"]
    tool_name: FunctionName


class ThinkingBlock(Strict):
    neutral: ClassVar[NeutralFields] = {"cache_control": (anything, "")}

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Strict):
    type: Literal["redacted_thinking"]
    data: str

    @model_validator(mode="after")
    def _is_noted(self, info: ValidationInfo) -> "RedactedThinkingBlock":
        note(info, "redacted_thinking: another server's secret, which the model is not shown")
        return self


class DirectCaller(Strict):
    type: Literal["direct"]


class ToolUseBlock(CachedBlock):
    neutral: ClassVar[NeutralFields] = {"toolset_name": (anything, "")}

    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: Json
    caller: DirectCaller | None = None


Shown = TextBlock | ImageBlock
"""What a model can be shown."""
Result = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]


class ToolResultBlock(CachedBlock):
    neutral: ClassVar[NeutralFields] = {"toolset_name": (anything, "")}

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Result] = ""
    is_error: bool | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else text_of(self.content)

    @property
    def images(self) -> list[ImageBlock]:
        parts = () if isinstance(self.content, str) else shown(self.content)
        return [part for part in parts if isinstance(part, ImageBlock)]


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock,
    Field(discriminator="type"),
]


def shown(blocks: Sequence[Any]) -> Iterator[Shown]:
    """Yield what blocks say and show, in order."""
    for block in blocks:
        match block:
            case TextBlock() | ImageBlock():
                yield block
            case DocumentBlock():
                yield from _document(block)
            case SearchResultBlock(source=source, title=title, content=content):
                said = "\n".join(part.text for part in content)
                yield _said(f"<search_result>\n{_head(title=title, source=source)}{said}\n</search_result>\n")
            case ToolReferenceBlock(tool_name=name):
                yield _said(f"The tool {name} is available.\n")
            case _:
                pass


def text_of(blocks: Sequence[Any]) -> str:
    """Return what blocks say."""
    return "".join(block.text for block in shown(blocks) if isinstance(block, TextBlock))


def _document(block: DocumentBlock) -> Iterator[Shown]:
    """Yield a document between tags: models then tell it from what the user says."""
    yield _said(f"<document>\n{_head(title=block.title, context=block.context)}")
    match block.source:
        case PlainSource(data=text):
            yield _said(text)
        case ContentSource(content=content):
            yield from [_said(content)] if isinstance(content, str) else content
    yield _said("\n</document>\n")


def _head(**facts: str | None) -> str:
    return "".join(f"<{name}>{fact}</{name}>\n" for name, fact in facts.items() if fact)


def _said(text: str) -> TextBlock:
    return TextBlock(type="text", text=text)

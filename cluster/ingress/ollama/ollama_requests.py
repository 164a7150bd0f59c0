"""Bodies of Ollama's /api/chat and /api/generate, and the requests that they stand for."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WrapValidator, model_validator

from cluster.ingress.bodies import request_fields as fields
from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, in_pieces, is_one_of
from cluster.ingress.bodies.cache_hints import CacheHintsBody, hints_of
from cluster.ingress.bodies.json_schema import Schema
from cluster.ingress.bodies.structured import json_form
from cluster.ingress.bodies.tool_bodies import MAX_TOOLS, Tools
from cluster.ingress.ollama.ollama_options import KeepAlive, OllamaOptions
from cluster.ingress.openai.request_bodies import CHATS_OWN
from cluster.ingress.requests.conversation import (
    ChatConversation,
    ChatMessage,
    MessageCall,
    MessageImage,
    MessageText,
    Part,
    content_of,
)
from cluster.ingress.requests.generation_request import AnswerForm, GenerationRequest, Terms
from core.errors import RequestError

Images = list[str]
"""In base64."""
_NO_IMAGES = "no images are made here"
OLLAMA_NEUTRAL: NeutralFields = {
    **CHATS_OWN,
    **{name: (is_one_of(), "it goes into options") for name in OllamaOptions.model_fields},
    "max_tokens": (is_one_of(), "it is called options.num_predict here"),
    "response_format": (is_one_of(), "it is called format here"),
    "reasoning_effort": (is_one_of(), "it is called think here"),
    "template": (is_one_of(""), "a template is a program: the model's own is used"),
    "metadata": (anything, ""),
    "width": (is_one_of(0), _NO_IMAGES),
    "height": (is_one_of(0), _NO_IMAGES),
    "steps": (is_one_of(0), _NO_IMAGES),
    "truncate": (is_one_of(False), "it is true or false"),
    "shift": (is_one_of(False), "it is true or false"),
}


class CalledTool(Strict):
    neutral: ClassVar[NeutralFields] = {"index": (anything, "")}

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])


class OllamaCall(Strict):
    """A call in the history. Ollama's own clients leave its id out."""

    neutral: ClassVar[NeutralFields] = {"type": (anything, ""), "index": (anything, "")}

    id: str | None = None
    function: CalledTool


class OllamaMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = ""
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    name: str | None = None
    """The tool of a result, from clients older than `tool_name`."""

    @model_validator(mode="after")
    def _suits_its_role(self) -> "OllamaMessage":
        if self.role != "assistant" and (self.tool_calls or self.thinking):
            raise ValueError("only an assistant's message has tool_calls or thinking")
        return self


class OllamaGeneration(Strict):
    """What both routes take that generate."""

    neutral: ClassVar[NeutralFields] = OLLAMA_NEUTRAL
    noted: ClassVar[NeutralFields] = {
        "truncate": (is_one_of(True), "a prompt that is too long is refused"),
        "shift": (is_one_of(True), "an answer ends where the context does"),
    }

    model: str
    stream: bool = True
    format: Literal["", "json"] | Schema | None = None
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    think: bool | fields.Effort | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    keep_alive: KeepAlive = None
    cache_hints: CacheHintsBody | None = None

    @property
    def effort(self) -> str | None:
        """How much reasoning the client asks for; None: it does not say."""
        return {True: "medium", False: "none"}[self.think] if isinstance(self.think, bool) else self.think

    @property
    def unloads(self) -> bool:
        """Whether `keep_alive` asks for the model to go."""
        return self.keep_alive is not None and not re.search("[1-9]", str(self.keep_alive))

    @property
    def form(self) -> AnswerForm | None:
        """What the answer must be. Raises RequestError for a schema that cannot be read."""
        if not isinstance(self.format, dict):
            return json_form("format", {"type": "object"}, strict=True) if self.format else None
        return json_form("format", self.format, strict=False)


class OllamaChat(OllamaGeneration):
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(
        default_factory=list[OllamaMessage]
    )
    tools: Tools | None = None


class OllamaGenerate(OllamaGeneration):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    images: Images | None = None
    raw: bool = False
    """Whether the prompt is taken as it is, without the chat template."""
    context: Annotated[list[fields.TokenNumber], Field(fail_fast=True), WrapValidator(in_pieces)] | None = (
        None
    )
    """The tokens of an earlier answer and its prompt, after which this goes on."""

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is no turn of a chat."""
        return self.raw or bool(self.suffix)

    def check(self) -> None:
        """Raise RequestError for fields that exclude each other."""
        taker = "raw=true" if self.raw else "suffix" if self.suffix else "context" if self.context else ""
        excluded = {
            "raw=true": ("suffix", "system", "context", "images", "think"),
            "suffix": ("system", "context", "images", "think"),
            "context": ("images",),
        }.get(taker, ())
        if found := next((name for name in excluded if getattr(self, name)), ""):
            raise RequestError(f"{found} does not go with {taker}", field=found)


class _Calls:
    """The calls that have no result yet. A result names its call by id, or its tool, or follows in the calls' order."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: dict[str, str] = {}
        """The tool's name, by the call's id."""
        self._of_tool: dict[str, dict[str, None]] = {}
        """Ids, by the tool's name."""

    def made(self, call: OllamaCall) -> MessageCall:
        made = MessageCall(
            call.id or f"call_{self._num_calls}", call.function.name, json.dumps(call.function.arguments)
        )
        self._num_calls += 1
        self._open[made.id] = made.name
        self._of_tool.setdefault(made.name, {})[made.id] = None
        return made

    def answered(self, result: OllamaMessage) -> str | None:
        """Return the id of the call that a result is of; None where there is none."""
        name = result.tool_name or result.name
        candidates: Iterable[str] = self._of_tool.get(name, ()) if name else self._open
        found = result.tool_call_id or next(iter(candidates), None)
        if found is not None and (tool := self._open.pop(found, None)) is not None:
            self._of_tool[tool].pop(found, None)
        return found


def conversation_of(body: OllamaChat) -> ChatConversation:
    """Return what a chat's prompt is made of. Raises RequestError."""
    messages = list(_messages(body.messages))
    last = messages[-1]
    goes_on = last.role == "assistant" and not last.calls and bool(last.text.strip())
    return ChatConversation(
        messages=messages,
        tools=tuple(tool.tool for tool in body.tools or ()),
        effort=body.effort,
        begins_answer=not goes_on,
        goes_on_by=last.place if goes_on else "",
    )


def turn_of(body: OllamaGenerate) -> ChatConversation:
    """Return the conversation of a prompt that is one turn. Raises RequestError."""
    system = [ChatMessage(role="system", content=body.system, place="system")] if body.system else []
    content = content_of(list(_parts(body.images, "images", body.prompt)))
    turn = ChatMessage(role="user", content=content, place="prompt")
    return ChatConversation(messages=[*system, turn], effort=body.effort)


def generation_of(
    body: OllamaGeneration, model: str, prompt_field: str, ends: tuple[int, ...] = ()
) -> GenerationRequest:
    """Return how the answer of `model` is generated. `ends` are token ids that end it as well. Raises RequestError."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs=true", field="top_logprobs")
    hints, retain = hints_of(body.cache_hints, None, None)
    return GenerationRequest(
        terms=Terms(model),
        prompt_field=prompt_field,
        max_tokens=body.options.max_tokens,
        sampling=body.options.sampling,
        seed=body.options.chosen_seed,
        stops=fields.as_tuple(body.options.stop),
        ends=ends,
        num_logprobs=body.top_logprobs if body.logprobs else -1,
        stream=body.stream,
        form=body.form,
        hints=hints,
        retain=retain,
    )


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[ChatMessage]:
    calls = _Calls()
    for at, message in enumerate(messages):
        place, is_result = f"messages[{at}]", message.role == "tool"
        yield ChatMessage(
            role=message.role,
            content=content_of(list(_parts(message.images, f"{place}.images", message.content))),
            name=message.tool_name or message.name,
            reasoning=message.thinking,
            calls=tuple(calls.made(call) for call in message.tool_calls or ()),
            call_id=calls.answered(message) if is_result else None,
            place=place,
        )


def _parts(images: Images | None, place: str, text: str) -> Iterator[Part]:
    """Yield the images, which go first, and the text."""
    for at, data in enumerate(images or ()):
        is_whole = data[:5].lower() == "data:"
        yield MessageImage(data if is_whole else f"data:image/*;base64,{data}", f"{place}[{at}]")
    if text or not images:
        yield MessageText(text)

"""Tools and calls in the bodies of chat requests."""

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything, note
from cluster.ingress.bodies.cache_hints import CacheControl
from cluster.ingress.bodies.json_schema import Schema
from cluster.ingress.requests import conversation

MAX_TOOLS, MAX_NAME = 512, 128


def without_tools(tools: Any, is_other: Callable[[Any], bool], info: ValidationInfo) -> Any:
    """Return the tools without those that this server cannot offer, which are noted."""
    if not isinstance(tools, list):
        return tools
    for index, tool in enumerate(tools):
        if is_other(tool):
            note(
                info,
                f"tools[{index}]: a tool of type {tool['type']!r} is not run here, and the model is not shown it",
            )
    return [tool for tool in tools if not is_other(tool)]


_VENDORS_TOOLS = re.compile(
    r"(web_search|web_search_preview|file_search|code_interpreter|computer|computer_use|computer_use_preview|image_generation"
    r"|mcp|local_shell|shell|apply_patch|custom|tool_search|programmatic_tool_calling)(_\d{4}_\d\d_\d\d)?"
)


def is_vendors(tool: Any) -> bool:
    """Return whether it is one of OpenAI's own tools, or a custom one, which answers with text instead of arguments."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and _VENDORS_TOOLS.fullmatch(kind) is not None


def own_tools(tools: Any, info: ValidationInfo) -> Any:
    return without_tools(tools, is_vendors, info)


FunctionName = Annotated[str, Field(pattern=rf"^[A-Za-z0-9_.-]{{1,{MAX_NAME}}}$")]


class Function(Strict):
    cache_control: CacheControl | None = Field(default=None, exclude=True)
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = Field(default=None, exclude=True)

    @property
    def tool(self) -> conversation.DeclaredTool:
        own = self.function
        return conversation.DeclaredTool(own.name, own.description, own.parameters, own.strict)

    @property
    def cache_controls(self) -> tuple[CacheControl | None, ...]:
        return self.cache_control, self.function.cache_control


class Named(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: Named


class ToolSubset(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChatTools(Strict):
    """Some of the tools. The model is shown no other."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


_OF_OTHERS: NeutralFields = dict.fromkeys(("provider_specific_fields", "extra_content"), (anything, ""))


class CalledFunction(Strict):
    neutral: ClassVar[NeutralFields] = _OF_OTHERS

    name: str
    arguments: str
    parsed_arguments: Any = Field(default=None, exclude=True)
    """What a client's SDK has parsed from the arguments, and sends back."""


class ToolCall(Strict):
    """A call in an assistant message that a client sends back."""

    neutral: ClassVar[NeutralFields] = _OF_OTHERS

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    @property
    def call(self) -> conversation.MessageCall:
        return conversation.MessageCall(self.id, self.function.name, self.function.arguments)


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), BeforeValidator(own_tools)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedChatTools
ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)]

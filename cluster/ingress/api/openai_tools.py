"""Tools and calls in the bodies of chat requests."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.ingress.api.request_json import parse_json
from core.errors import RequestError

MAX_TOOLS = 512


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Strict):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


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


class CalledFunction(Strict):
    name: str
    arguments: str
    parsed_arguments: Any = Field(default=None, exclude=True)
    """What a client's SDK has parsed from the arguments, and sends back."""


class ToolCall(Strict):
    """A call in an assistant message that a client sends back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedChatTools
ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)]


def object_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments. What a model wrote in place of an object stands under `text`, so that nothing is lost."""
    try:
        return parse_json(arguments.encode() or b"{}")
    except RequestError:
        return {"text": arguments}

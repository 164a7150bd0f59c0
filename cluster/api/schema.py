"""The bodies that clients send: every parameter of OpenAI's schema is honoured here, or refused by name.

pydantic is strict: "5" is no number and true is no integer."""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.errors import RequestError

M = TypeVar("M", bound=BaseModel)
Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False


class Common(_Strict):
    """What both generation routes take. None: the model's default."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    """Prefixes are shared only among requests with equal salts."""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        extra = {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}
        return {"role": self.role, "content": text, **extra}


class ChatRequest(Common):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionRequest(Common):
    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(_Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


Neutral = Callable[[Any], bool]


def _is(*values: Any) -> Neutral:
    return lambda value: (
        value is None or any(value is v or (value == v and type(value) is type(v)) for v in values)
    )


def _anything(_: Any) -> bool:
    return True


_TAGS = "it only labels requests for OpenAI's own bookkeeping"
NEUTRAL: dict[str, tuple[Neutral, str]] = {
    # name: (values that change nothing and are accepted, why other values are refused)
    "user": (_anything, _TAGS),
    "safety_identifier": (_anything, _TAGS),
    "metadata": (_anything, _TAGS),
    "prompt_cache_key": (_anything, "prefixes are found by content; cache_salt separates tenants"),
    "prompt_cache_retention": (_is(), "blocks stay cached for as long as there is room"),
    "prompt_cache_options": (_is(), "blocks stay cached for as long as there is room"),
    "store": (_is(False), "Baton stores no completions"),
    "service_tier": (_is("auto", "default"), "classes are chosen by the header x-slo-class"),
    "parallel_tool_calls": (_is(True, False), "tools are not supported yet"),
    "tools": (_is([]), "tools are not supported yet"),
    "tool_choice": (_is("none", "auto"), "tools are not supported yet"),
    "functions": (_is([]), "functions are not supported yet"),
    "function_call": (_is("none", "auto"), "functions are not supported yet"),
    "response_format": (_is({"type": "text"}), "only plain text is supported yet"),
    "modalities": (_is(["text"]), "only text is generated"),
    "audio": (_is(), "only text is generated"),
    "prediction": (_is(), "predicted outputs are not supported"),
    "reasoning_effort": (_is("none"), "the served models have no reasoning effort"),
    "verbosity": (_is("medium"), "the served models have no verbosity setting"),
    "web_search_options": (_is(), "there is no web search"),
    "moderation": (_is(), "there is no moderation model"),
    "suffix": (_is(""), "inserting text before a suffix is not supported"),
    "priority": (_is(0), "classes are chosen by the header x-slo-class"),
}


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises RequestError for anything else."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}"
        ) from error
    except UnicodeEncodeError as error:
        raise RequestError("the body has a \\u escape of half a character (a lone surrogate)") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def validate(kind: type[M], body: Mapping[str, Any]) -> M:
    """Raises RequestError, naming the field."""
    known: dict[str, Any] = {}
    for name, value in body.items():
        if name in kind.model_fields:
            known[name] = value
        elif name not in NEUTRAL:
            raise RequestError(f"unknown parameter {name!r}", field=name, code="unknown_parameter")
        elif not NEUTRAL[name][0](value):
            raise RequestError(
                f"{name!r} is not supported: {NEUTRAL[name][1]}", field=name, code="unsupported_parameter"
            )
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> RequestError:
    """The deepest complaint: of a union's branches the one that came furthest."""
    worst = max(error.errors(include_url=False, include_context=False), key=lambda e: len(e["loc"]))
    path = [
        part
        for part in worst["loc"]
        if isinstance(part, int) or not part.startswith(("list[", "constrained", "function-"))
    ]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    name = str(worst["loc"][0])
    missing = worst["type"] == "missing"
    text = f"{name!r} is required" if missing and len(path) == 1 else f"{where}: {worst['msg']}"
    return RequestError(text, field=name, code="missing_required_parameter" if missing else None)

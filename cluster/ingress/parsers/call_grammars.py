"""Grammars that guarantee calls: the markup of a model's family around arguments that keep to their tool's schema."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.ingress.parsers import deepseek, hermes, mistral, qwen_coder
from cluster.ingress.parsers.argument_rules import ArgumentMarkup, argument_rules
from cluster.ingress.parsers.model_formats import ToolFormat

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between JSON's tokens. Without a bound a model could write white space until its tokens are spent."""


_FENCE, _FENCE_END = "\n```json\n", "\n```"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    name: str
    schema: Mapping[str, Any]
    """The schema of its arguments."""
    strict: bool = False
    """Whether all of the schema must hold. Otherwise keywords that the grammar does not know are passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarkup:
    """Parts of Lark rules: `opening first call (following call)* closing`."""

    opening: str = ""
    """The mark by which calls are told from text. Where it is empty, an answer that begins with `bracket` is a call."""
    bracket: str = "{"
    first: str = ""
    following: str = ""
    closing: str = ""
    heads: Mapping[str, str] = field(default_factory=dict[str, str])
    """By tool, what stands before its arguments. Where it is empty, a call is an object with the tool's name in it."""
    tail: str = ""
    """What stands behind the object or the arguments."""
    arguments_key: str = "arguments"
    one_by_one: ArgumentMarkup | None = None
    """How each argument is written. None: they are one JSON object."""


def markup_of(
    tools: ToolFormat, names: Sequence[str], special_tokens: Mapping[str, int], template: str
) -> CallMarkup | None:
    """Return a family's markup, or None where it has none of its own: the calls of harmony are on channels, of which
    `harmony_grammar` makes one grammar with everything else."""

    def mark(text: str) -> str:
        return f"<[{special_tokens[text]}]>" if text in special_tokens else _text(text)

    match tools:
        case "hermes":
            begin, line = mark(hermes.BEGIN), _text("\n")
            return CallMarkup(
                opening=begin,
                first=line,
                following=f"{line} {begin} {line}",
                tail=f"{line} {mark(hermes.END)}",
            )
        case "llama3_json":
            return CallMarkup(following=_text(";"), arguments_key="parameters")
        case "mistral":
            begin, behind = mark(mistral.BEGIN), mark(mistral.ARGUMENTS)
            if mistral.ARGUMENTS not in special_tokens:
                return CallMarkup(opening=begin, first=_text("["), following=_text(", "), closing=_text("]"))
            return CallMarkup(
                opening=begin, following=begin, heads={name: f"{_text(name)} {behind}" for name in names}
            )
        case "deepseek_v3":
            begin, separator, end = map(mark, (deepseek.CALL_BEGIN, deepseek.SEPARATOR, deepseek.CALL_END))
            heads = {name: f"{begin} {_text(name)} {separator}" for name in names}
            markup = CallMarkup(
                opening=mark(deepseek.CALLS_BEGIN), closing=mark(deepseek.CALLS_END), heads=heads, tail=end
            )
            if "```json" not in template:
                return markup
            fenced = {
                name: f"{begin} {_text('function')} {separator} {_text(name + _FENCE)}" for name in names
            }
            return CallMarkup(
                opening=markup.opening,
                following=_text("\n"),
                closing=markup.closing,
                heads=fenced,
                tail=f"{_text(_FENCE_END)} {end}",
            )
        case "pythonic":
            return CallMarkup(
                bracket="[",
                first=_text("["),
                following=_text(", "),
                closing=_text("]"),
                heads={name: _text(f"{name}(") for name in names},
                tail=_text(")"),
                one_by_one=ArgumentMarkup(behind_key="=", separator=", ", keys_are_names=True),
            )
        case "qwen3_coder":
            begin, line = mark(qwen_coder.BEGIN), _text("\n")
            return CallMarkup(
                opening=begin,
                first=line,
                following=f"{line} {begin} {line}",
                heads={name: _text(f"{qwen_coder.FUNCTION}{name}>\n") for name in names},
                tail=f"{_text(qwen_coder.FUNCTION_END)} {line} {mark(qwen_coder.END)}",
                one_by_one=ArgumentMarkup(
                    before=qwen_coder.PARAMETER, behind_key=">", end=qwen_coder.PARAMETER_END, space="\n"
                ),
            )
        case "none" | "harmony":
            return None


def call_grammar(
    markup: CallMarkup,
    tools: Sequence[CallableTool],
    *,
    must_call: bool,
    one_call: bool,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Return a grammar in Lark. With `must_call` it allows nothing but calls. Otherwise free text, or JSON of the schema
    `answer`, may stand in their place.

    Raises ValueError for a strict tool whose arguments it cannot hold to their schema."""
    rules = [rule for i, tool in enumerate(tools) for rule in _call(markup, tool, f"call_{i}")]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    more = "" if one_call else f"({markup.following} call)*"
    rules.append(f"calls: {markup.first} call {more} {markup.closing}")
    if must_call or answer is not None:
        start = f"{markup.opening} calls"
        if answer is not None and not must_call:
            start += " | answer"
            rules.append(f"answer: %json {_json(answer, {'whitespace_pattern': WHITESPACE})}")
    elif not markup.opening:
        start = "calls | TEXT"
        rules.append(rf"TEXT: /\s*([^\s\{markup.bracket}](.|\n)*)?/")
    elif markup.opening.startswith("<["):
        start = f"TEXT ({markup.opening} calls)?"
        rules.append(r"TEXT: /(.|\n)*/")
    else:
        start = "TEXT | opened calls"
        rules += [f"opened[lazy]: TEXT {markup.opening}", r"TEXT: /(.|\n)*/"]
    return "\n".join(("%llguidance {}", f"start: {start}", *rules)) + "\n"


def arguments_rule(tool: CallableTool) -> str:
    """Return a tool's arguments as a part of a Lark rule."""
    return f"%json {_json(_arguments(tool), _options(tool))}"


def _arguments(tool: CallableTool) -> dict[str, Any]:
    return dict(tool.schema) or {"type": "object"}


def _options(tool: CallableTool) -> dict[str, Any]:
    return {"whitespace_pattern": WHITESPACE, **({} if tool.strict else {"lenient": True})}


def _call(markup: CallMarkup, tool: CallableTool, rule: str) -> list[str]:
    """Return the rules of a call, of which `rule` is all of it."""
    head = markup.heads.get(tool.name)
    if head is None:
        return [f"{rule}: {_call_object(markup, tool)} {markup.tail}"]
    if markup.one_by_one is None:
        return [f"{rule}: {head} {arguments_rule(tool)} {markup.tail}"]

    def json_part(schema: Mapping[str, Any]) -> str:
        return f"%json {_json(schema, _options(tool))}"

    whole = f"{rule}: {head} {rule}_arguments {markup.tail}"
    return [
        whole,
        *argument_rules(
            tool.schema, markup.one_by_one, json_part, rule=f"{rule}_arguments", strict=tool.strict
        ),
    ]


def _call_object(markup: CallMarkup, tool: CallableTool) -> str:
    arguments = _arguments(tool)
    # What `#/$defs/...` points to is looked for at the top.
    definitions = {key: arguments.pop(key) for key in ("$defs", "definitions") if key in arguments}
    members = {"name": {"const": tool.name}, markup.arguments_key: arguments}
    whole = {
        "type": "object",
        "properties": members,
        "required": list(members),
        "additionalProperties": False,
        **definitions,
    }
    return f"%json {_json(whole, _options(tool))}"


def _text(text: str) -> str:
    return json.dumps(text)


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": options})

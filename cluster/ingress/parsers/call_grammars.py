"""Grammars that guarantee calls: the markup of a model's family around arguments that keep to their tool's schema."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.ingress.parsers.argument_rules import argument_rules, text_up_to
from cluster.ingress.parsers.call_markups import CallMarkup
from cluster.ingress.parsers.schema_forms import enforceable, moved

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between JSON's tokens. Without a bound a model could write white space until its tokens are spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableTool:
    name: str
    schema: Mapping[str, Any]
    """The schema of its arguments."""
    strict: bool = False
    """Whether all of the schema must hold. Otherwise keywords that the grammar does not know are passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSchema:
    """The schema of an answer that is JSON."""

    schema: Mapping[str, Any]
    strict: bool
    """As of a tool."""


def call_grammar(
    markup: CallMarkup,
    tools: Sequence[CallableTool],
    *,
    must_call: bool,
    one_call: bool,
    answer: AnswerSchema | None = None,
    reasons: bool = False,
) -> str:
    """Return a grammar in Lark. With `must_call` it allows nothing but calls. Otherwise free text, or JSON of the schema
    `answer`, may stand in their place. `reasons`: white space may stand first, which models write behind their reasoning.

    Raises ValueError for a strict tool whose arguments it cannot hold to their schema."""
    rules = [rule for i, tool in enumerate(tools) for rule in _call(markup, tool, f"call_{i}")]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    more = "" if one_call else f"({markup.following} call)*"
    rules.append(f"calls: {markup.first} call {more} {markup.closing}")
    if must_call or answer is not None:
        start = f"{markup.opening} calls"
        if answer is not None and not must_call:
            start += " | answer"
            schema = enforceable(answer.schema, lenient=not answer.strict)
            rules.append(f"answer: %json {_json(schema, json_options(strict=answer.strict))}")
        if reasons:
            start = f"SPACE? ({start})"
            rules.append(f"SPACE: /{WHITESPACE}/")
    elif not markup.opening:
        start = "calls | TEXT"
        rules.append(rf"TEXT: /\s*([^\s\{markup.bracket}](.|\n)*)?/")
    elif markup.opening.startswith("<["):
        start = f"TEXT ({markup.opening} calls)?"
        rules.append(r"TEXT: /(.|\n)*/")
    else:
        start = "TEXT | opened calls"
        lazy, text = text_up_to(markup.opening)
        rules += [f"opened{lazy}: {text}", r"TEXT: /(.|\n)*/"]
    return "\n".join(("%llguidance {}", f"start: {start}", *rules)) + "\n"


def arguments_rule(tool: CallableTool) -> str:
    """Return a tool's arguments as a part of a Lark rule."""
    return f"%json {_json(_arguments(tool), json_options(strict=tool.strict))}"


def _arguments(tool: CallableTool) -> dict[str, Any]:
    return enforceable(tool.schema, lenient=not tool.strict) or {"type": "object"}


def json_options(*, strict: bool) -> dict[str, Any]:
    """Return llguidance's options for JSON of a schema."""
    return {"whitespace_pattern": WHITESPACE, **({} if strict else {"lenient": True})}


def _call(markup: CallMarkup, tool: CallableTool, rule: str) -> list[str]:
    """Return the rules of a call, of which `rule` is all of it."""
    head = markup.heads.get(tool.name)
    if head is None:
        return [f"{rule}: {_call_object(markup, tool)} {markup.tail}"]
    if markup.one_by_one is None:
        return [f"{rule}: {head} {arguments_rule(tool)} {markup.tail}"]

    def json_part(schema: Mapping[str, Any]) -> str:
        return f"%json {_json(schema, json_options(strict=tool.strict))}"

    whole = f"{rule}: {head} {rule}_arguments {markup.tail}"
    return [
        whole,
        *argument_rules(
            _arguments(tool), markup.one_by_one, json_part, rule=f"{rule}_arguments", strict=tool.strict
        ),
    ]


def _call_object(markup: CallMarkup, tool: CallableTool) -> str:
    key = markup.arguments_key
    number = {markup.id_key: {"type": "string", "pattern": "^[0-9]{1,4}$"}} if markup.id_key else {}
    arguments = moved(_arguments(tool), f"#/properties/{key}")
    members = {**number, markup.name_key: {"const": tool.name}, key: arguments}
    whole = {
        "type": "object",
        "properties": members,
        "required": list(members),
        "additionalProperties": False,
    }
    return f"%json {_json(whole, json_options(strict=tool.strict))}"


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": options})

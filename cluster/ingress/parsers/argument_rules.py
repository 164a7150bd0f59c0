"""Grammar rules for arguments that stand one by one, as Python's `key=value` or in XML, each held to its property's schema.

They are written in the schema's order: required ones always, others perhaps. Nothing is written that the schema does not name,
so that all of the schema holds where it only says which properties there are, and which of them must be."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SAYS_PROPERTIES = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id")
)
_SAYS_NOTHING = frozenset(("title", "description", "$comment", "default", "examples", "deprecated"))
_BINDS_TEXT = frozenset(("pattern", "format", "minLength", "maxLength"))

JsonPart = Callable[[Mapping[str, Any]], str]
"""Makes a part of a Lark rule: JSON of a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentMarkup:
    """How one argument is written: `before key behind_key value end`, and what stands between two."""

    before: str = ""
    behind_key: str
    end: str = ""
    """Where it is not empty, a string is bare text up to this mark."""
    space: str = ""
    """White space around a value, and behind `end`."""
    separator: str = ""
    keys_are_names: bool = False
    """Whether a key must be one of Python's names."""


def argument_rules(
    schema: Mapping[str, Any], markup: ArgumentMarkup, json_part: JsonPart, *, rule: str, strict: bool
) -> list[str]:
    """Return Lark rules, of which `rule` is all arguments. Raises ValueError for what cannot be kept to, which is passed over
    unless the tool is `strict`."""
    if strict and (unknown := set(schema) - _SAYS_PROPERTIES - _SAYS_NOTHING):
        raise ValueError(f"{min(unknown)} cannot be kept to where arguments are written one by one")
    named, required = schema.get("properties", {}), schema.get("required", ())
    properties = {**named, **{key: True for key in required if key not in named}}
    possible: dict[str, Any] = {key: value for key, value in properties.items() if value is not False}
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules: list[str] = []
    for number, (key, value) in enumerate(possible.items()):
        held = {**({} if value is True else value), **definitions}
        rules += _argument(key, held, markup, json_part, rule=f"{rule}_{number}", strict=strict)
    return [*rules, *_in_order([key in required for key in possible], markup.separator, rule)]


def _argument(
    key: str,
    schema: Mapping[str, Any],
    markup: ArgumentMarkup,
    json_part: JsonPart,
    *,
    rule: str,
    strict: bool,
) -> list[str]:
    is_writable = key.isidentifier() if markup.keys_are_names else bool(key) and not set(key) & set("<>\n")
    if not is_writable or key != key.strip():
        raise ValueError(f"the property {key!r} cannot be written in this model's markup")
    head = _text(f"{markup.before}{key}{markup.behind_key}{markup.space}")
    if markup.end and schema.get("type") == "string":
        string = f"{rule}_string"
        return [f"{rule}: {head} {string} {_text(markup.space)}", *_bare(schema, markup, string, strict)]
    tail = _text(f"{markup.space}{markup.end}{markup.space}") if markup.end else ""
    return [f"{rule}: {head} {json_part(schema)} {tail}"]


def _bare(schema: Mapping[str, Any], markup: ArgumentMarkup, rule: str, strict: bool) -> list[str]:
    """Return the rules of a string up to its end mark."""
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    if words is not None:
        words = [word for word in words if isinstance(word, str) and markup.end not in word]
        return [f"{rule}: " + " | ".join(_text(f"{word}{markup.space}{markup.end}") for word in words)]
    if strict and (bound := _BINDS_TEXT & set(schema)):
        raise ValueError(
            f"{min(bound)} cannot be kept to by a string that this model's markup has as bare text"
        )
    return [f"{rule}[lazy]: /(.|\\n)*/ {_text(markup.end)}"]


def _in_order(required: Sequence[bool], separator: str, rule: str) -> list[str]:
    """Return rules for arguments in order, with separators between those that there are. `NAME_behind_I` are those from the I-th
    on behind another."""
    rules: list[str] = []
    for behind in (False, True):
        name = f"{rule}_behind" if behind else f"{rule}_from"
        for number, must in enumerate(required):
            lead = f"{_text(separator)} " if behind and separator else ""
            way = f"{lead}{rule}_{number} {rule}_behind_{number + 1}"
            rules.append(f"{name}_{number}: {way}" + ("" if must else f" | {name}_{number + 1}"))
        rules.append(f'{name}_{len(required)}: ""')
    return [*rules, f"{rule}: {rule}_from_0"]


def _text(text: str) -> str:
    return json.dumps(text)

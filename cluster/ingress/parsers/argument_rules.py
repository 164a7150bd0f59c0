"""Grammar rules for arguments that stand one by one, as Python's `key=value` or in XML, each held to its property's schema.

They are written in the schema's order: required ones always, others perhaps. Nothing is written that the schema does not name,
so that all of the schema holds where it only says which properties there are, and which of them must be."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.ingress.parsers.schema_forms import Schema, part_of, pointed_at

_SAYS_PROPERTIES = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id")
)
_SAYS_NOTHING = frozenset(("title", "description", "$comment", "default", "examples", "deprecated"))
_BINDS_TEXT = frozenset(("pattern", "format", "minLength", "maxLength"))
_MIXED = re.compile(r'("(?:[^"\\]|\\.)*") (<\[.*)')
"""A string and a special token behind it, as parts of a Lark rule."""

T = TypeVar("T")
JsonPart = Callable[[Schema], str]
"""Makes a part of a Lark rule: JSON of a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentMarkup:
    """How one argument is written: `before key behind_key value end`, and what stands between two."""

    before: str = ""
    behind_key: str
    text_sign: str = ""
    json_sign: str = ""
    """What stands behind that before a string as bare text, and before JSON."""
    end: str = ""
    """Where it is not empty, a string is bare text up to this mark."""
    json_end: str | None = None
    """What ends other values; None: the same."""
    space: str = ""
    """White space around a value."""
    behind: str = ""
    """What stands behind `end`."""
    separator: str = ""
    keys_are_names: bool = False
    """Whether a key must be one of Python's names."""
    lark: Callable[[str], str] = json.dumps
    """Writes a text as a part of a rule, with the special tokens in it."""


def text_up_to(end: str) -> tuple[str, str]:
    """Return a rule's attribute, and its parts: any text, and `end` behind it. No text has a special token in it, so that nothing
    needs to look for an end that has one."""
    if mixed := _MIXED.match(end):
        before = re.escape(json.loads(mixed[1])).replace("/", "\\/")
        return "", f"/(.|\\n)*{before}/ {mixed[2]}"
    return "" if end.startswith("<[") else "[lazy]", f"/(.|\\n)*/ {end}"


def argument_rules(
    schema: Schema, markup: ArgumentMarkup, json_part: JsonPart, *, rule: str, strict: bool
) -> list[str]:
    """Return Lark rules, of which `rule` is all arguments. Raises ValueError for what cannot be kept to, which is passed over
    unless the tool is `strict`."""
    named, required = _members(schema, schema, {}, strict=strict)
    properties = {**named, **{key: True for key in required if key not in named}}
    possible: dict[str, Any] = {key: value for key, value in properties.items() if value is not False}
    rules: list[str] = []
    for number, (key, value) in enumerate(possible.items()):
        writer = _ArgumentWriter(schema, markup, json_part, strict)
        if value is not True and not isinstance(value, Mapping):
            raise ValueError(f"the schema of the property {key!r} must be an object")
        rules += writer.rules(key, {} if value is True else value, f"{rule}_{number}")  # type: ignore[reportUnknownArgumentType]
    return [*rules, *_in_order([key in required for key in possible], markup.separator, rule)]


def _members(
    schema: Any, root: Schema, known: dict[int, Any], *, strict: bool
) -> tuple[dict[str, Any], set[str]]:
    """Return the arguments that an object's schema names, also where it refers to another one or is put together of several,
    and which of them there must be. `known` are the schemas that were looked at."""
    if not isinstance(schema, Mapping) or id(schema) in known:  # type: ignore[reportUnknownArgumentType]
        return {}, set()
    one: Schema = schema
    known[id(one)] = one
    pointed = pointed_at(one.get("$ref"), root)
    unknown = set(one) - _SAYS_PROPERTIES - _SAYS_NOTHING - ({"$ref"} if pointed is not None else set())
    if strict and unknown:
        raise ValueError(f"{min(unknown)} cannot be kept to where arguments are written one by one")
    named, required = dict[str, Any](_given(one, "properties", dict)), _names(one)
    for part in (pointed, *_given(one, "allOf", list)):
        more, needed = _members(part, root, known, strict=strict)
        named, required = {**more, **named}, required | needed
    for branch in (*_given(one, "anyOf", list), *_given(one, "oneOf", list)):
        named = {**_members(branch, root, known, strict=strict)[0], **named}
    return named, required


def _names(schema: Schema) -> set[str]:
    """Return the arguments that must be there. Raises ValueError."""
    names: list[Any] = _given(schema, "required", list)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("required must be a list of names")
    return {*names}


def _given(schema: Schema, keyword: str, kind: type[T]) -> T:
    """Return the list, or the object, that a keyword has; an empty one where there is none. Raises ValueError."""
    value = schema.get(keyword) or kind()
    if not isinstance(value, kind):
        raise ValueError(f"{keyword} must be {'a list' if kind is list else 'an object'}")
    return value


@dataclass(frozen=True, slots=True)
class _ArgumentWriter:
    root: Schema
    """The schema of all arguments."""
    markup: ArgumentMarkup
    json_part: JsonPart
    strict: bool

    def rules(self, key: str, schema: Schema, rule: str) -> list[str]:
        """Return the rules of one argument, of which `rule` is all of it."""
        markup = self.markup
        is_writable = (
            key.isidentifier()
            if markup.keys_are_names
            else bool(key) and not set(key) & {*"<>\n", markup.behind_key[0]}
        )
        if not is_writable or key != key.strip():
            raise ValueError(f"the property {key!r} cannot be written in this model's markup")
        head = markup.lark(f"{markup.before}{key}{markup.behind_key}")
        if not markup.end:
            return [f"{rule}: {head} {_text(markup.space)} {self._json(schema)}"]
        if self.strict and schema.get("type") == "string" and (bound := _BINDS_TEXT & set(schema)):
            raise ValueError(
                f"{min(bound)} cannot be kept to by a string that this model's markup has as bare text"
            )
        branches = self._branches(schema)
        if any(map(self._is_free_text, branches)):
            lazy, text = text_up_to(markup.lark(markup.end))
            return [
                f"{rule}: {head} {markup.lark(markup.text_sign + markup.space)} {rule}_text {_text(markup.behind)}",
                f"{rule}_text{lazy}: {text}",
            ]
        ways = [way for branch in branches for way in self._ways(branch)]
        if not ways:
            raise ValueError(f"no value of the property {key!r} can be written in this model's markup")
        return [f"{rule}: {head} ({' | '.join(ways)}) {_text(markup.behind)}"]

    def _branches(self, schema: Any) -> list[Schema]:
        """Return the schemas of which a value keeps to one, each once."""
        found: list[Schema] = []
        known: dict[int, Any] = {}
        left = [schema]
        while left:
            each = left.pop(0)
            if each is False or id(each) in known:
                continue
            known[id(each)] = each
            one: Schema = (
                {key: value for key, value in each.items() if key not in _SAYS_NOTHING}  # type: ignore[reportUnknownVariableType]
                if isinstance(each, Mapping)
                else {}
            )
            inner = self._inner(one)
            left = [*(inner or ()), *left]
            if inner is None:
                found.append(one)
        return found

    def _inner(self, schema: Schema) -> Sequence[Any] | None:
        """Return the schemas of which one is all that `schema` says; None where it says something itself."""
        says = schema.keys() - {"$defs", "definitions"}
        unions = {"anyOf"} if self.strict else {"anyOf", "oneOf"}
        if says == {"$ref"} and (found := pointed_at(schema["$ref"], self.root)) is not None:
            return [found]
        parts: Any = schema[min(says)] if len(says) == 1 else None
        if isinstance(parts, list) and (says <= unions or (says == {"allOf"} and len(parts) == 1)):  # type: ignore[reportUnknownArgumentType]
            return parts  # type: ignore[reportUnknownVariableType]
        if isinstance(kinds := schema.get("type"), list) and _values_of(schema) is None:
            return [{**schema, "type": kind} for kind in kinds]  # type: ignore[reportUnknownVariableType]
        return None

    def _is_free_text(self, schema: Schema) -> bool:
        if not schema.keys() - {"$defs", "definitions"}:
            return True
        is_string = schema.get("type") == "string" and _values_of(schema) is None
        return is_string and not (self.strict and _BINDS_TEXT & set(schema))

    def _ways(self, schema: Schema) -> Iterator[str]:
        """Yield how a value of a schema and what ends it can be written: a string that is listed bare, everything as JSON."""
        end, lark = self.markup.end, self.markup.lark
        text_sign, json_sign = (
            lark(sign + self.markup.space) for sign in (self.markup.text_sign, self.markup.json_sign)
        )
        tail = f"{self.markup.space}{end}"
        json_end = end if self.markup.json_end is None else self.markup.json_end
        json_tail = f"{self.markup.space}{json_end}"
        if (values := _values_of(schema)) is None:
            yield f"{json_sign} {self._json(schema)} {lark(json_tail)}"
            return
        said = schema.get("type")
        kinds: set[str] = (
            {said} if isinstance(said, str) else {*map(str, said if isinstance(said, list) else ())}
        )  # type: ignore[reportUnknownArgumentType]
        values = [value for value in values if not kinds or kinds & _kinds_of(value)]
        words = (word for word in values if isinstance(word, str) and end not in word)
        yield from (f"{text_sign} {_text(word)} {lark(tail)}" for word in words)
        is_text = schema.get("type") == "string"  # whose quotes would be a part of it
        if others := [value for value in values if not (is_text and isinstance(value, str))]:
            yield f"{json_sign} {self.json_part({'enum': others})} {lark(json_tail)}"

    def _json(self, schema: Schema) -> str:
        return self.json_part(part_of(schema, self.root))


def _values_of(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists, if it does."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None  # type: ignore[reportUnknownVariableType]


def _kinds_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case _:
            return {"array" if isinstance(value, list) else "object"}


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

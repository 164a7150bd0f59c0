"""What arguments mean that do not say it themselves: bare text, and values without names. The tool's schema decides."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import isfinite
from typing import Any

from cluster.ingress.parsers.json_text import JsonText, Malformed
from cluster.ingress.parsers.schema_forms import pointed_at

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]
"""The JSON schema of each tool's parameters, by the tool's name."""

_ALL = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
_UNIONS = ("anyOf", "oneOf")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_MAX_DIGITS = 2000
"""The longest number that is written in another way."""
_NULLS = ("null", "none")
_BOOLEANS = ("true", "false")


def to_json(value: object) -> str:
    """Return the value as JSON. Raises ValueError or TypeError for what JSON cannot say."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()  # A lone surrogate is no text that can be sent.
    return text


def properties_of(tool: Schema) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments, also where a reference or a union holds them."""
    found: dict[str, Any] = {}
    for branch in _branches(tool, tool):
        found = {**_mapping(branch.get("properties")), **found}
    return found


def property_of(tool: Schema, key: str) -> Any:
    """Return the schema of one argument. An argument without a name of its own may be any of those that have none."""
    properties = properties_of(tool)
    if key in properties:
        return properties[key]
    others = [*_mapping(tool.get("patternProperties")).values(), tool.get("additionalProperties")]
    return {"anyOf": [schema for schema in others if isinstance(schema, Mapping)]}


def is_text(schema: Any) -> bool:
    """Return whether an argument's bare text is its value, as it stands."""
    if not isinstance(schema, Mapping):
        return False
    one: Schema = schema
    return one.get("type") == "string" and one.get("nullable") is not True


def of_bare_text(text: str, schema: Any, tool: Schema) -> str:
    """Return the JSON that a bare text means, by its schema within the schema of its tool."""
    if is_text(schema):
        return to_json(text)
    kinds, words = kinds_of(schema, tool), _words_of(schema, tool)
    if text in words:
        return to_json(text)
    if text.strip() in words:
        return to_json(text.strip())
    found = _read(text.strip(), kinds)
    if found is not None:
        return found
    if "string" in kinds:
        return to_json(text)
    return _strict(text) or to_json(text)


def fitted(value: str, schema: Any, tool: Schema) -> str:
    """Return a JSON value as its schema has it, where the model wrote a string for a number or the other way round."""
    kinds = kinds_of(schema, tool)
    parsed = json.loads(value)
    if isinstance(parsed, str) and "string" not in kinds:
        return _read(parsed.strip(), kinds) or value
    if isinstance(parsed, bool | int | float) and "string" in kinds and _kind_of(parsed) not in kinds:
        return to_json(value)
    return value


def object_text(text: str, tool: Schema) -> str:
    """Return the object of arguments that a JSON value stands for: a string with the object's JSON in it, a list of values in the
    order of the schema, null, or one value alone. What stands for none stays as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        inner = of_literal(value.strip()) if value.strip() else "null"
        if inner is None or isinstance(json.loads(inner), str):
            return named([value], tool) or text
        value, text = json.loads(inner), inner
    if value is None:
        return "{}"
    if isinstance(value, Mapping):
        return text
    return named(value if isinstance(value, list) else [value], tool) or text


def named(values: Sequence[Any], tool: Schema) -> str | None:
    """Return the arguments that a list of values stands for, as an object's JSON; None where that cannot be told."""
    try:
        return _named(values, tool)
    except (ValueError, RecursionError):  # a number beyond floating point
        return None


def _named(values: Sequence[Any], tool: Schema) -> str | None:
    if not values:
        return "{}"
    properties = properties_of(tool)
    first = values[0]
    is_object = len(values) == 1 and isinstance(first, Mapping)
    if is_object and (not properties or set(first) & set(properties)):
        return to_json(first)
    names = list(properties)
    if len(names) == 1 and "array" in kinds_of(properties[names[0]], tool) and not isinstance(first, list):
        return to_json({names[0]: list(values)})
    return to_json(dict(zip(names, values, strict=False))) if len(values) <= len(names) else None


def of_literal(text: str) -> str | None:
    """Return the JSON of a literal of JSON or Python; None where it is none."""
    if (found := _strict(text)) is not None:
        return found
    try:
        return to_json(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _mended(text) if text[:1] in tuple("{[\"'") else None


def kinds_of(schema: Any, root: Schema) -> frozenset[str]:
    """Return the types of JSON that a schema allows."""
    return _kinds(schema, root, {})


def _kinds(schema: Any, root: Schema, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """`known` are those of the schemas that were looked at. One that refers to itself says nothing by that."""
    if not isinstance(schema, Mapping):
        return _ALL
    one: Schema = schema
    if id(one) in known:
        return known[id(one)]
    known[id(one)] = _ALL
    found = _own_kinds(one)
    if isinstance(reference := one.get("$ref"), str):
        found &= _kinds(pointed_at(reference, root), root, known)
    for union in _UNIONS:
        if branches := _list(one.get(union)):
            found &= frozenset().union(*(_kinds(branch, root, known) for branch in branches))
    for part in _list(one.get("allOf")):
        found &= _kinds(part, root, known)
    known[id(one)] = found | {"null"} if one.get("nullable") is True else found
    return known[id(one)]


def _own_kinds(schema: Schema) -> frozenset[str]:
    said = schema.get("type")
    kinds = frozenset((said,) if isinstance(said, str) else map(str, _list(said))) or _ALL
    if "number" in kinds:
        kinds |= {"integer"}
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    return kinds & {_kind_of(value) for value in values} if values else kinds


def _kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _words_of(schema: Any, root: Schema) -> frozenset[str]:
    """Return the strings that a schema names one by one."""
    found: set[str] = set()
    for branch in _branches(schema, root):
        values = [branch["const"]] if "const" in branch else _list(branch.get("enum"))
        found |= {value for value in values if isinstance(value, str)}
    return frozenset(found)


def _branches(schema: Any, root: Schema) -> list[Schema]:
    """Return a schema and all that it refers to or is put together of, each once."""
    found: dict[int, Schema] = {}
    left = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, Mapping) or id(one) in found:  # type: ignore[reportUnknownArgumentType]
            continue
        branch: Schema = one
        found[id(branch)] = branch
        parts = [part for union in ("allOf", *_UNIONS) for part in _list(branch.get(union))]
        reference = branch.get("$ref")
        left += parts[::-1] + ([pointed_at(reference, root)] if isinstance(reference, str) else [])
    return list(found.values())


def _read(text: str, kinds: frozenset[str]) -> str | None:
    """Return the JSON of a text that is written as one of `kinds`, a string in quotes among them; None where it is none."""
    if kinds >= _ALL:
        return _strict(text)
    if "null" in kinds and (text.lower() in _NULLS or (not text and "string" not in kinds)):
        return "null"
    if "boolean" in kinds and text.lower() in _BOOLEANS:
        return text.lower()
    if kinds & {"integer", "number"} and _NUMBER.fullmatch(text):
        return _number(text, whole="number" not in kinds, or_text="string" in kinds)
    if ("object" in kinds and text[:1] == "{") or ("array" in kinds and text[:1] == "["):
        return of_literal(text)
    return _strict(text) if "string" in kinds and text[:1] == '"' else None


def _number(text: str, *, whole: bool, or_text: bool) -> str | None:
    """Return a number as JSON. A `whole` one has no point and no exponent, where it is one."""
    strict = _strict(text)
    if strict is None and or_text:
        return None
    if strict is not None and (not whole or strict.lstrip("-").isdigit()):
        return strict
    return _integral(text) or strict or _real(text)


def _integral(text: str) -> str | None:
    exponent = text.lower().partition("e")[2] or "0"
    if len(text) > _MAX_DIGITS or abs(int(exponent)) > _MAX_DIGITS:
        return None
    number = Decimal(text)
    return str(int(number)) if number == number.to_integral_value() else None


def _real(text: str) -> str | None:
    number = float(text)
    return to_json(number) if isfinite(number) else None


def _strict(text: str) -> str | None:
    """Return a text that is JSON, as it stands."""
    try:
        json.loads(text, parse_constant=_no_constant)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return text.strip()


def _mended(text: str) -> str | None:
    """Return JSON of a text that is nearly JSON."""
    parts: list[str] = []
    value = JsonText(parts.append)
    try:
        rest = value.feed(text)
    except Malformed:
        return None
    return None if rest.strip() or not value.close() else _strict("".join(parts))


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []  # type: ignore[reportUnknownVariableType]


def _mapping(value: Any) -> Schema:
    return value if isinstance(value, Mapping) else {}  # type: ignore[reportUnknownVariableType]

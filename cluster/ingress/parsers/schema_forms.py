"""JSON schemas in forms that grammars can hold: moved with their references, and with keywords in place of those that no grammar
knows."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

Schema = Mapping[str, Any]

_LITERALS = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose values are no schemas."""
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values have a schema for each name."""
_NAMES = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\))\$")
"""A pattern that says no more than a list of names."""
_BEYOND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9bB]")
"""What no automaton follows: a look around, a reference to a group, the border of a word."""
_ROOT = "__root__"
_MOST_DIGITS = 10
"""No list has so many items that its numbers are as long, and Python reads no number of any length."""


def moved(schema: Schema, to: str) -> dict[str, Any]:
    """Return a schema that will stand at the pointer `to` of a larger one. Its references point to itself as before."""
    if isinstance(schema.get("$id"), str):
        return dict(schema)  # it is the root of its references wherever it stands
    return _mapped(schema, partial(_moved_reference, to), own=True)


def part_of(schema: Schema, root: Schema) -> dict[str, Any]:
    """Return a part of the schema `root` as a schema of its own. Its references point into `root` as before."""
    if not any("$ref" in each for each in _all(schema)):
        return dict(schema)
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    if all(_points_to_definition(each.get("$ref", "#/$defs/")) for each in _all({**schema, **definitions})):
        return {**schema, **definitions}
    place = f"#/$defs/{_ROOT}"
    inner = _mapped(schema, partial(_moved_reference, place), own=True)
    own = inner.get("$defs")
    return {**inner, "$defs": {**(own if isinstance(own, Mapping) else {}), _ROOT: moved(root, place)}}


def _points_to_definition(reference: object) -> bool:
    return isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/"))


def pointed_at(reference: object, root: Schema) -> Any:
    """Return what a reference points to within `root`; None where that is nothing, or elsewhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and _is_index(key) and int(key) < len(place):  # type: ignore[reportUnknownArgumentType]
            place = place[int(key)]
        else:
            place = place.get(key) if isinstance(place, Mapping) else None  # type: ignore[reportUnknownMemberType]
    return place if reference in ("#", "#/") or "/" in reference else None


def _is_index(key: str) -> bool:
    return key.isdecimal() and len(key) < _MOST_DIGITS


def enforceable(schema: Schema, *, lenient: bool) -> dict[str, Any]:
    """Return the schema with patterns of property names as names, where they are no more, and without keywords that say nothing.
    A `lenient` one also loses what no grammar can hold, and keeps what can be said in another way."""
    return _mapped(schema, partial(_enforceable, lenient=lenient))


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]], *, own: bool = False) -> Any:
    """Return a schema with each schema in it changed. With `own` those within one that has an id are left as they are."""
    if isinstance(schema, list):
        return [_mapped(each, change, own=own) for each in schema]  # type: ignore[reportUnknownVariableType]
    if not isinstance(schema, Mapping) or (own and isinstance(schema.get("$id"), str)):  # type: ignore[reportUnknownMemberType]
        return schema  # type: ignore[reportUnknownVariableType]
    out: dict[str, Any] = {}
    for key, value in schema.items():  # type: ignore[reportUnknownVariableType]
        if key in _BY_NAME and isinstance(value, Mapping):
            out[key] = {name: _mapped(each, change, own=own) for name, each in value.items()}  # type: ignore[reportUnknownVariableType]
        else:
            out[key] = value if key in _LITERALS else _mapped(value, change, own=own)
    return change(out)


def _all(schema: Any) -> Iterator[Schema]:
    """Yield a schema and all within it."""
    found: list[Schema] = []

    def note(one: dict[str, Any]) -> dict[str, Any]:
        found.append(one)
        return one

    _mapped(schema, note)
    yield from found


def _moved_reference(to: str, schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        return {**schema, "$ref": to + reference[1:].rstrip("/")}
    return schema


def _enforceable(schema: dict[str, Any], *, lenient: bool) -> dict[str, Any]:
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if schema.get("propertyNames") in ({}, {"type": "string"}, True):
        del schema["propertyNames"]
    if lenient and isinstance(pattern := schema.get("pattern"), str) and _BEYOND.search(pattern):
        del schema["pattern"]
    if lenient and isinstance(names := schema.get("propertyNames"), Mapping):
        schema = _with_names(schema, names)  # type: ignore[reportUnknownArgumentType]
    patterns, properties = schema.get("patternProperties"), schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        return schema  # no schema: the grammar's compiler says so
    if isinstance(patterns, Mapping) and not schema.keys() & {"minProperties", "maxProperties"}:
        schema = _with_patterns(schema, patterns, lenient=lenient)  # type: ignore[reportUnknownArgumentType]
    return schema


def _with_names(schema: dict[str, Any], names: Schema) -> dict[str, Any]:
    """Return an object's schema without `propertyNames`: they are patterns of properties where it has no others."""
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    if schema.keys() & {"properties", "patternProperties"}:
        return rest
    value = rest.pop("additionalProperties", True)
    words = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(words, list):
        properties = {word: value for word in words if isinstance(word, str)}  # type: ignore[reportUnknownVariableType]
        return {**rest, "properties": properties, "additionalProperties": False}
    if isinstance(names.get("pattern"), str):
        return {**rest, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    return {**rest, "additionalProperties": value}


def _with_patterns(schema: dict[str, Any], patterns: Schema, *, lenient: bool) -> dict[str, Any]:
    """Return an object's schema with properties in place of those patterns that are names. A key that is one already would leave
    such a pattern without any, and an output that had begun another key at a dead end."""
    properties: dict[str, Any] = dict(schema.get("properties") or {})
    left: dict[str, Any] = {}
    for pattern, value in patterns.items():
        if (found := _NAMES.fullmatch(pattern)) is None:
            left[pattern] = value
            continue
        for name in (found[1] or found[2]).split("|"):
            properties[name] = _both(properties[name], value) if name in properties else value
    rest = {key: value for key, value in schema.items() if key not in ("properties", "patternProperties")}
    if properties:
        rest["properties"] = properties
    if not left:
        return rest
    if not lenient or (len(left) == 1 and not _BEYOND.search(next(iter(left)))):
        return {**rest, "patternProperties": left}
    return {**rest, "additionalProperties": _any_of([*left.values(), rest.get("additionalProperties", True)])}


def _both(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    return (
        {"allOf": [each for each in (one, other) if each is not True]}
        if True not in (one, other)
        else (other if one is True else one)
    )


def _any_of(schemas: Sequence[Any]) -> Any:
    if any(schema is True or schema == {} for schema in schemas):
        return True
    return {"anyOf": [schema for schema in schemas if schema is not False]}

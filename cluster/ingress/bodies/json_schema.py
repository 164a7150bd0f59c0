"""JSON schemas of clients: some of their generators write null for keywords that do not apply."""

from typing import Annotated, Any, cast

from pydantic import AfterValidator

_VALUES = ("const", "default")
"""Keywords that mean something where their value is null."""
_DATA = ("enum", "examples", "example")
"""Keywords whose values are the client's own, with their nulls."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with a schema for each name."""


def without_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without keywords that are null. A property whose schema is null may have any value."""
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _VALUES:
            out[keyword] = value
        elif keyword in _BY_NAME and isinstance(value, dict):
            named = cast("dict[str, Any]", value)
            out[keyword] = {name: {} if one is None else _inner(one) for name, one in named.items()}
        elif value is not None:
            out[keyword] = value if keyword in _DATA else _inner(value)
    return out


def _inner(value: Any) -> Any:
    if isinstance(value, dict):
        return without_nulls(cast("dict[str, Any]", value))
    if isinstance(value, list):
        return [_inner(one) for one in cast("list[Any]", value)]
    return value


Schema = Annotated[dict[str, Any], AfterValidator(without_nulls)]

"""Tools as templates can render them that join fields which a client may leave out."""

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def with_neutral_values(tool: Json) -> dict[str, Any]:
    """Return the tool with an empty value for each optional field that it lacks."""
    function = _given(tool["function"])
    parameters = {"type": "object", "properties": {}, "required": [], **_given(function.get("parameters"))}
    properties = parameters["properties"]
    if isinstance(properties, Mapping):
        parameters["properties"] = {name: _property(schema) for name, schema in properties.items()}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}


def _property(schema: Any) -> Any:
    return {"type": "any", "description": "", **_given(schema)} if isinstance(schema, Mapping) else schema


def _given(fields: Any) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {name: value for name, value in (fields or {}).items() if value is not None}

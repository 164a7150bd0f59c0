"""Says what is wrong with a request's body: which place in it, what may stand there, and what does."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from core.errors import RequestError

_MAX_SHOWN = 40
"""The most characters of a value that a complaint repeats."""
_KINDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BOUNDS = {
    # pydantic's kind of error: (the bound's name in its context, what that means)
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
_LENGTHS = {
    "too_short": ("min_length", "at least", "item"),
    "too_long": ("max_length", "at most", "item"),
    "string_too_short": ("min_length", "at least", "character"),
    "string_too_long": ("max_length", "at most", "character"),
}
_BRANCHES = (
    *("str", "none", "NamedTool", "AllowedChatTools", "NamedFunction", "AllowedTools"),
    *("FunctionTool", "NamespaceTool"),
)
_FIELDS = ("function", "allowed_tools")
"""Values of `type` that are also the name of the field beside it, in kinds of things that pydantic does not choose by `type`."""


def explain(error: ValidationError, body: Mapping[str, Any]) -> RequestError:
    """Return the deepest complaint. Among a union's branches that is the one that came furthest, and a bad value before a wrong
    type."""
    errors = error.errors(include_url=False)
    worst = max(errors, key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")))
    # What has another `type` lacks the fields of this one.
    kinds = (e for e in errors if e["loc"] == (*worst["loc"][:-1], "type") and e["type"] == "literal_error")
    worst = next(kinds, worst)
    path = _path_of(worst["loc"], body)
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    name = str(worst["loc"][0]) if worst["loc"] else None
    missing = worst["type"] == "missing"
    if missing and len(path) == 1:
        text = f"{name!r} is required"
    elif worst["type"] == "none_required" or path[-1:] == ["annotations"]:
        text = f"{where} is not supported"
    elif worst["type"] == "literal_error":
        alike = [e for e in errors if e["type"] == "literal_error" and _path_of(e["loc"], body) == path]
        expected = " or ".join(dict.fromkeys(e.get("ctx", {})["expected"] for e in alike))
        text = f"{where} must be {expected}, not {_shown(worst['input'])}"
    else:
        text = _sentence(worst, where)
    return RequestError(text, field=name, code="missing_required_parameter" if missing else None)


def _sentence(error: ErrorDetails, where: str) -> str:
    kind, said, given = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return f"{where} is required"
    if kind in _KINDS:
        return f"{where} must be {_KINDS[kind]}, not {_shown(given)}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{where} must be {words} {_shown(said[bound])}, not {_shown(given)}"
    if kind in _LENGTHS:
        bound, words, unit = _LENGTHS[kind]
        many = "" if said[bound] == 1 else "s"
        return f"{where} must have {words} {said[bound]} {unit}{many}, not {len(given)}"
    if kind == "union_tag_invalid":
        place = f"{where}.{said['discriminator'].strip(chr(39))}"
        return f"{place} must be one of {said['expected_tags']}, not {_shown(said['tag'])}"
    if kind == "union_tag_not_found":
        return f"{where}.{said['discriminator'].strip(chr(39))} is required"
    return f"{where}: {error['msg'].removeprefix('Value error, ')}"


def _shown(value: Any) -> str:
    """Return a value as JSON has it, where it is short; else what kind of thing it is."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "…")
        case int() | float():
            return str(value).removesuffix(".0")[:_MAX_SHOWN]
        case list():
            return "a list"
        case _:
            return "an object"


def _is_branch(part: int | str) -> bool:
    """Return whether this is how pydantic names a branch of a union, which no client knows."""
    return isinstance(part, str) and (
        part in _BRANCHES or part.startswith(("list[", "dict[", "constrained", "function-", "literal["))
    )


def _path_of(place: Sequence[int | str], body: Any) -> list[int | str]:
    """Return the names that lead to a place in the body: without branches, and without the `type` that pydantic names before a
    field of one of several kinds."""
    path: list[int | str] = []
    is_named = False
    for part in place:
        if _is_branch(part):
            continue
        kind = body.get("type") if isinstance(body, dict) else None
        if part == kind not in _FIELDS and not is_named:
            is_named = True
            continue
        path.append(part)
        is_named = False
        try:
            body = body[part]
        except (LookupError, TypeError):
            body = None
    return path

"""Says what is wrong with a configuration in plain words: which key, which value, what is allowed instead."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

_KINDS: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_BOUNDS: Mapping[str, str] = {
    "ge": "at least {}",
    "gt": "more than {}",
    "le": "at most {}",
    "lt": "less than {}",
}

_MOVED: Mapping[str, str] = {
    f"transfer.{name}": f"security.{name}" for name in ("tls_cert", "tls_key", "tls_ca")
}
"""Keys that have another place now."""


def keys_of(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key with dots, and its field, in the order of the classes."""
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def allowed(field: FieldInfo) -> str:
    """Return `a whole number of at least 1 and at most 256`, `one of auto, shm and tcp`, ..."""
    said = _kind(field.annotation)
    bounds = [
        text.format(_number(getattr(rule, name)))
        for rule in field.metadata
        for name, text in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return f"{said} of {' and '.join(bounds)}" if bounds else said


def sentence(kind: type[BaseModel], error: ErrorDetails, *, secret: bool) -> str:
    """Return one line about the first thing that pydantic found."""
    where = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        return _unknown(kind, where)
    fields = dict(keys_of(kind))
    if any(name.startswith(".".join(where) + ".") for name in fields):
        return f"{'.'.join(where)} must be keys and their values, not {error['input']!r}"
    # Where a value may be of several kinds, pydantic appends to the key the kind that it has tried.
    while len(where) > 1 and ".".join(where) not in fields:
        where.pop()
    key = ".".join(where)
    got = "" if secret else f", not {error['input']!r}"
    if error["type"] == "missing":
        return f"{'.'.join(str(part) for part in error['loc'])} is missing"
    if (field := fields.get(key)) is None or _is_free(field):
        return (
            f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}{got.replace(', not', '; it is')}"
        )
    return f"{key} must be {allowed(field)}{got}"


def _unknown(kind: type[BaseModel], where: Sequence[str]) -> str:
    key = ".".join(where)
    if where[0] == "models" and len(where) == 3 and where[2] in kind.model_fields:
        return f"{key}: {where[2]} is for all models together: set it beside models"
    known = [name for name, _ in keys_of(kind)]
    above = "".join(f"{part}." for part in where[:-1])
    beside = {name.removeprefix(above).partition(".")[0] for name in known if name.startswith(above)}
    near = [_MOVED[key]] if key in _MOVED else []
    near = near or [above + one for one in get_close_matches(where[-1], sorted(beside), 1, 0.5)]
    near = near or get_close_matches(key, known, 1, 0.6)
    near = near or [name for name in known if name.rpartition(".")[2] == where[-1]][:1]
    return f"there is no configuration key {key}" + (f"; did you mean {near[0]}?" if near else "")


def _is_free(field: FieldInfo) -> bool:
    """Return whether it holds a mapping of the user's own names."""
    return get_origin(_bare(field.annotation)) not in (None, Literal, Union, UnionType, tuple, list)


def _kind(annotation: Any) -> str:
    if shown := title_of(annotation):
        return shown
    bare = _bare(annotation)
    origin, inner = get_origin(bare), [one for one in get_args(bare) if one is not Ellipsis]
    if origin is Literal:
        names = [str(one) for one in inner]
        return names[0] if len(names) == 1 else f"one of {', '.join(names[:-1])} and {names[-1]}"
    if origin in (Union, UnionType):
        return " or ".join(_kind(one) for one in inner if one is not type(None))
    if origin in (tuple, list):
        return f"a list of {_kind(inner[0])}s".replace("a list of a ", "a list of ")
    return _KINDS.get(bare, "a text")


def title_of(annotation: Any) -> str:
    """Return what a kind of text looks like, where it says so; else nothing."""
    rules = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((rule.title for rule in rules if isinstance(rule, FieldInfo) and rule.title), "")


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

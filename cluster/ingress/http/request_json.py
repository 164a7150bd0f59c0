"""Parses the JSON that clients send, within bounds that everything behind it can rely on."""

import codecs
import json
import math
from typing import Any

from core.errors import RequestError

_MAX_DEPTH = 128
"""The deepest nesting. Templates, grammars and serialisers recurse, and give up somewhere behind 200 levels."""
_MAX_CONTAINERS, _MAX_STRINGS, _MAX_VALUES = 1 << 16, 1 << 17, 1 << 20
"""The most lists and objects, strings and keys, and values of a body. Python parses about a million of the first two in a second,
in which it does nothing else. The values are the token ids of eight prompts of 128 Ki tokens."""
_PIECE_BYTES = 256 << 10


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, whose numbers are finite. Raises RequestError for anything else, naming the field where it can."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise RequestError("the body is empty: send a JSON object")
    _check_size(body)
    infinite: list[str] = []
    text = _text_of(body)
    value = _value_of(text, infinite)
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}")
    # Counting brackets spares most bodies the walk.
    if text.count("[") + text.count("{") > _MAX_DEPTH:
        _check_depth(value)
    if infinite:
        field = next((name for name, part in value.items() if _is_infinite(part)), None)
        raise RequestError(f"{field}: the number {infinite[0][:32]} is too large", field=field)
    return value


def _text_of(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}"
        ) from error


def _value_of(text: str, infinite: list[str]) -> Any:
    """Parse `text`. The numbers that are too large for a float are appended to `infinite`."""

    def number(digits: str) -> float:
        if math.isinf(parsed := float(digits)):
            infinite.append(digits)
        return parsed

    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=number)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("the body has a \\u escape of half a character (a lone surrogate)") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    return value


def _check_depth(value: dict[str, Any]) -> None:
    for name, part in value.items():
        if _is_deeper(part, _MAX_DEPTH - 1):
            raise RequestError(
                f"{name!r} is nested too deeply: {_MAX_DEPTH} levels are the limit", field=name
            )


def _check_size(body: bytes) -> None:
    """Raise RequestError for more of anything than is parsed in a moment."""
    # Most bodies have less even with all that stands in their texts.
    if (
        _num_containers(body) <= _MAX_CONTAINERS
        and body.count(b'"') <= 2 * _MAX_STRINGS
        and body.count(b",") < _MAX_VALUES
    ):
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    in_string = num_strings = num_containers = 0
    num_values = 1
    for start in range(0, len(plain), _PIECE_BYTES):  # between pieces other threads have their turn
        parts = plain[start : start + _PIECE_BYTES].split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string ^= (len(parts) - 1) % 2
        num_strings += len(parts) // 2
        num_containers += _num_containers(outside)
        num_values += outside.count(b",")
        for found, most, name in (
            (num_containers, _MAX_CONTAINERS, "lists and objects"),
            (num_strings, _MAX_STRINGS, "strings and keys"),
            (num_values, _MAX_VALUES, "values"),
        ):
            if found > most:
                raise RequestError(f"the body has more than {most} {name}, which is the limit")


def _num_containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _is_deeper(value: Any, limit: int) -> bool:
    """Return whether lists and objects are nested more than `limit` deep."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            child
            for one in level
            for child in (one.values() if isinstance(one, dict) else one)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _is_infinite(value: Any) -> bool:
    """Return whether it is, or holds, a number beyond all bounds."""
    if isinstance(value, dict | list):
        return any(map(_is_infinite, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and math.isinf(value)

"""Parses the JSON that clients send, within bounds that everything behind it can rely on."""

import json
import math
from typing import Any

from core.errors import RequestError

_MAX_DEPTH = 128
"""The deepest nesting. Templates, grammars and serialisers recurse, and give up somewhere behind 200 levels."""


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, whose numbers are finite. Raises RequestError for anything else, naming the field where it can."""
    if not body.strip():
        raise RequestError("the body is empty: send a JSON object")
    infinite: list[str] = []

    def number(digits: str) -> float:
        if math.isinf(parsed := float(digits)):
            infinite.append(digits)
        return parsed

    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=number)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}"
        ) from error
    except UnicodeEncodeError as error:
        raise RequestError("the body has a \\u escape of half a character (a lone surrogate)") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}")
    # Counting brackets spares most bodies the walk.
    if text.count("[") + text.count("{") > _MAX_DEPTH:
        for name, part in value.items():
            if _is_deeper(part, _MAX_DEPTH - 1):
                raise RequestError(
                    f"{name!r} is nested too deeply: {_MAX_DEPTH} levels are the limit", field=name
                )
    if infinite:
        field = next((name for name, part in value.items() if _is_infinite(part)), None)
        raise RequestError(f"{field}: the number {infinite[0][:32]} is too large", field=field)
    return value


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

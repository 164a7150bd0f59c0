"""Parses the JSON that clients send, within bounds that everything behind it can rely on."""

import codecs
import math
import re
from typing import Any

from cluster.ingress.http.number_lists import parse
from cluster.ingress.tenants.pieces import between_pieces
from core.errors import RequestError

_MAX_DEPTH = 128
"""The deepest nesting. Templates, grammars and serialisers recurse, and give up somewhere behind 200 levels."""
_MAX_CONTAINERS, _MAX_STRINGS, _MAX_VALUES = 1 << 16, 1 << 17, 5 << 17
"""The most lists and objects, strings and keys, and values of a body. About 500,000 objects are validated in a second, in which
the process does little else. The values are the token ids of five prompts of 128 Ki tokens."""
_PIECE_BYTES = 256 << 10
_NUMBER = re.compile(rb"-?\d[\d.]*(?:[eE][-+]?\d+)?")
_SHAPE = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE = b"0" * 210, b"e000", b"e+000"
"""The shapes of numbers that may be too large for a float, which ends at 308 digits: digits and an exponent of two more, or an
exponent of three."""


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, whose numbers are finite. Raises RequestError for anything else, naming the field where it can."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise RequestError("the body is empty: send a JSON object")
    _check_size(body)
    try:
        value = parse(body)
    except ValueError as error:
        raise RequestError(_in_words(str(error))) from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {type(value).__name__}")
    # Counting brackets spares most bodies the walk.
    if _num_containers(body) > _MAX_DEPTH:
        _check_depth(value)
    if _may_be_infinite(body):
        _check_finite(value, body)
    return value


def object_of(arguments: str) -> dict[str, Any]:
    """Return a call's arguments. What a model wrote in place of an object stands under `text`, so that nothing is lost."""
    try:
        return parse_json(arguments.encode() or b"{}")
    except RequestError:
        return {"text": arguments}


def _in_words(error: str) -> str:
    """Say what is wrong with a body that the parser has refused."""
    where = error[error.rfind(" at line") :]
    if error.startswith("recursion limit"):
        return "the body is nested too deeply"
    if error.startswith("invalid unicode"):
        return f"the body is not UTF-8{where}"
    if "hex escape" in error:
        return f"the body has a \\u escape of half a character (a lone surrogate){where}"
    return f"the body is not JSON: {error}"


def _may_be_infinite(body: bytes) -> bool:
    """Return whether the body may have a number that is too large for a float. In its texts such numbers do no harm."""
    overlap = len(_LARGE[0])
    for start in range(0, len(body), _PIECE_BYTES):
        between_pieces()
        shape = body[start : start + _PIECE_BYTES + overlap].translate(_SHAPE)
        if any(large in shape for large in _LARGE):
            return True
    return False


def _check_finite(value: dict[str, Any], body: bytes) -> None:
    field = next((name for name, part in value.items() if _is_infinite(part)), None)
    if field is None:
        return
    found = (match[0] for match in _NUMBER.finditer(body))
    number = next(digits for digits in found if math.isinf(_float_of(digits)))
    raise RequestError(f"{field}: the number {number[:32].decode()} is too large", field=field)


def _float_of(digits: bytes) -> float:
    try:
        return float(digits)
    except ValueError:  # something in a text, such as 1.2.3
        return 0.0


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
    for start in range(0, len(plain), _PIECE_BYTES):
        between_pieces()
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

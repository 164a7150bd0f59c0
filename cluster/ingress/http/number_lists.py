"""Parses JSON whose long lists of numbers are parsed piece by piece: between two pieces other threads have Python's lock."""

import re
import secrets
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from cluster.ingress.tenants.pieces import between_pieces

PIECE_BYTES = 32 << 10
_IN_LISTS = b"0123456789+-.eE, \t\r\n"
_PLACE = re.compile(r" at line \d+ column \d+$")


def parse(body: bytes) -> Any:
    """Return what the JSON says. Raises ValueError, with a line and a column where there are no long lists."""
    runs = [*_runs(body)] if len(body) > 2 * PIECE_BYTES else []
    if not runs:
        return _parse(body)
    names = [secrets.randbits(128) for _ in runs]  # no client can write any
    rest, ended = list[bytes](), 0
    for name, (begin, end) in zip(names, runs, strict=True):
        rest += body[ended:begin], b"%d" % name
        ended = end
    try:
        value = _parse(b"".join((*rest, body[ended:])))
        numbers = [_numbers(body, begin, end) for begin, end in runs]
    except ValueError as error:
        raise ValueError(_PLACE.sub("", str(error))) from None
    _put_back(value, dict(zip(names, numbers, strict=True)))
    return value


def _parse(text: bytes) -> Any:
    between_pieces()
    return from_json(text, allow_inf_nan=False, cache_strings="keys")


def _runs(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield where numbers begin and end that fill whole pieces of the body: from behind a comma to before one."""
    plain = body
    if b"\\" in body:
        plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    in_string, begin = 0, None
    for start in range(0, len(plain) + PIECE_BYTES, PIECE_BYTES):
        between_pieces()
        piece = plain[start : start + PIECE_BYTES]
        are_numbers = bool(piece) and not in_string and not piece.translate(None, _IN_LISTS)
        if are_numbers and begin is None:
            begin = start
        if not are_numbers and begin is not None:
            first, last = plain.find(b",", begin, start) + 1, plain.rfind(b",", begin, start)
            if 0 < first < last:
                yield first, last
            begin = None
        in_string ^= piece.count(b'"') % 2


def _numbers(body: bytes, begin: int, end: int) -> list[Any]:
    found: list[Any] = []
    while True:
        comma = body.find(b",", min(begin + PIECE_BYTES, end), end)
        last = end if comma < 0 else comma
        piece = body[begin:last]
        found += _parse(b"[%s]" % (piece if piece.strip() else b","))
        if comma < 0:
            return found
        begin = last + 1


def _put_back(value: Any, numbers: dict[int, list[Any]]) -> None:
    """Put each list in the place of its name."""
    left = [value]
    while left and numbers:
        one = left.pop()
        parts = one.values() if isinstance(one, dict) else one
        left += [part for part in parts if isinstance(part, dict | list)]
        if isinstance(one, list):
            places = [at for at, part in enumerate(one) if isinstance(part, int) and part in numbers]
            for at in reversed(places):
                one[at : at + 1] = numbers.pop(one[at])

"""Long lists of numbers are parsed piece by piece, and nobody can tell."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from cluster.ingress.http import number_lists

NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    NUMBERS | st.text() | st.booleans() | st.none() | st.lists(NUMBERS, min_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_lists, "PIECE_BYTES", 8)


def both(body: bytes) -> tuple[Any, Any]:
    """What it is by pieces, and what it is in one."""
    found: list[Any] = []
    for parse in (number_lists.parse, lambda text: from_json(text, allow_inf_nan=False)):
        try:
            found.append(repr(parse(body)))
        except ValueError:
            found.append(None)
    return found[0], found[1]


@settings(max_examples=200, deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 0, 3]), separator=st.sampled_from([",", ", ", " ,\r\n"]))
def test_what_is_valid_is_read_as_ever(value: object, indent: int | None, separator: str) -> None:
    pieces, whole = both(json.dumps(value, indent=indent, separators=(separator, ":")).encode())
    assert pieces == whole


@settings(max_examples=300, deadline=None)
@given(
    value=VALUES,
    at=st.floats(0, 1),
    cut=st.integers(0, 3),
    put=st.sampled_from(
        [b"", b",", b",,", b" ", b"x", b"-", b"1e", b'"', b"\\", b"[", b"]", b"}", b"\n", b"1", b"."]
    ),
)
def test_what_is_broken_is_refused_or_read_as_ever(value: object, at: float, cut: int, put: bytes) -> None:
    body = json.dumps(value).encode()
    place = int(at * len(body))
    pieces, whole = both(body[:place] + put + body[place + cut :])
    assert pieces == whole


@pytest.mark.parametrize("wrong", [b",", b" ,", b"x", b"1 2", b"-", b"1.", b"]", b"{}"])
@pytest.mark.parametrize("where", [0, 7, 50, 99])
def test_a_mistake_among_many_numbers_is_seen(wrong: bytes, where: int) -> None:
    numbers = [b"%d" % number for number in range(100)]
    numbers[where] += wrong
    pieces, whole = both(b'{"a": "\\"[",\n"b": [' + b",\n ".join(numbers) + b"]}")
    assert pieces is whole is None


def test_numbers_in_a_text_stay_there() -> None:
    text = "1," * 100
    pieces, whole = both(json.dumps({"a": text, "b\\": [f'"{text}']}).encode())
    assert pieces == whole

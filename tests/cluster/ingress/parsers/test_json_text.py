"""JSON as models write it becomes JSON, and what is JSON stays as it is."""

import json
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.ingress.parsers.json_text import JsonText, Malformed
from tests.cluster.ingress.parsers.test_parsers import split

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=st.dictionaries(st.text(max_size=5), VALUE, max_size=4),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    at=st.lists(st.integers(0, 200), max_size=5),
)
def test_what_is_json_stays_as_it_stands(
    value: dict[str, Any], indent: int | None, ascii_only: bool, at: list[int]
) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    parts: list[str] = []
    reader = JsonText(parts.append)
    rest = "".join(
        reader.feed(piece) if not reader.is_done else piece for piece in split(written + " tail", at)
    )
    assert ("".join(parts), rest) == (written, " tail")


@given(st.text("{}[]\"':,\\ntrue1.5 <\n", max_size=30))
def test_whatever_is_closed_is_json(written: str) -> None:
    parts: list[str] = []
    reader = JsonText(parts.append)
    with suppress(Malformed):
        reader.feed("{" + written)
        if reader.close():
            json.loads("".join(parts))

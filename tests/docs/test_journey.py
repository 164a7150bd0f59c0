"""The journey of one request names every message, and every field of it."""

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import core.messages
import core.types

PAGE = Path(__file__).parents[2] / "docs/journey.md"
ROWS = {
    row[1]: re.findall(r"`(\w+)`", row[2])
    for row in re.finditer(r"^\| `([A-Z]\w+)` \|(?:[^|`]*\|)? ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
}
VALUES = (
    core.types.Request,
    core.types.TokenOut,
    core.messages.Grant,
    core.messages.RegionKey,
    core.messages.HandoverTimes,
)


def test_every_message_and_its_fields_are_there_and_nothing_else() -> None:
    kinds = (*get_args(core.messages.Message), *VALUES)
    assert {kind.__name__: [field.name for field in fields(kind)] for kind in kinds} == ROWS

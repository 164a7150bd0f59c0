"""Cases of large matrices, of which each day takes a part: `pytest` leaves out the others, unless their file is named.

`@pytest.mark.turns(3)` has a case run on one day of three. Every value of every parameter is in some case of each day, as far as
there are enough: a case's number is the sum of its parameters' places in their lists, and of its test's place in the file.
`BATON_TEST_DAY=every` runs all cases."""

import os
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

_DAY = "BATON_TEST_DAY"
TODAY = os.environ.setdefault(_DAY, str(datetime.now(UTC).date().toordinal()))
"""Processes that this one starts have the same day, also after midnight."""


def left_out(items: Sequence[pytest.Item], named: Sequence[str], day: str = TODAY) -> set[pytest.Item]:
    """Return the cases of other days. `named` is what pytest was asked for."""
    if day == "every":
        return set()
    whole = {Path(argument.partition("::")[0]).resolve() for argument in named}
    places: defaultdict[Path, dict[str, int]] = defaultdict(dict)
    found: set[pytest.Item] = set()
    for item in items:
        mark, tests = item.get_closest_marker("turns"), places[item.path]
        place = tests.setdefault(item.nodeid.partition("[")[0], len(tests))
        if mark is None or item.path in whole:
            continue
        number = mark.kwargs.get("number", place + _sum_of_places(item))
        if number % mark.args[0] != int(day) % mark.args[0]:
            found.add(item)
    return found


def _sum_of_places(item: pytest.Item) -> int:
    """Count parameters that are in one list as one."""
    callspec = getattr(item, "callspec", None)
    places: dict[str, int] = dict(callspec.indices) if callspec else {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for name in names[1:]:
            places.pop(name.strip(), None)
    return sum(places.values())

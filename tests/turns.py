"""Cases of large matrices, of which each day takes a part: `pytest` leaves out the others, unless their file is named.

`@pytest.mark.turns(3)` has a case run on one day of three. Every value of every parameter is in some case of each day, as far as
there are enough: a case's number is the sum of its parameters' places in their lists, and of its test's place in the file. A test
of fewer cases has one on each day. `BATON_TEST_DAY=every` runs all cases."""

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

_DAY = "BATON_TEST_DAY"
TODAY = os.environ.setdefault(_DAY, str(datetime.now(UTC).date().toordinal()))
"""Processes that this one starts have the same day, also after midnight."""


def number_of_today() -> int:
    """Return a number that is larger by one each day. All processes of a run have the same, also after midnight."""
    return datetime.now(UTC).date().toordinal() if TODAY == "every" else int(TODAY)


def left_out(items: Sequence[pytest.Item], named: Sequence[str], day: str = TODAY) -> set[pytest.Item]:
    """Return the cases of other days. `named` is what pytest was asked for."""
    if day == "every":
        return set()
    whole = {Path(argument.partition("::")[0]).resolve() for argument in named}
    num_cases = Counter(_test_of(item) for item in items)
    places: defaultdict[Path, dict[str, int]] = defaultdict(dict)
    found: set[pytest.Item] = set()
    for item in items:
        mark, tests = item.get_closest_marker("turns"), places[item.path]
        place = tests.setdefault(_test_of(item), len(tests))
        if mark is None or item.path in whole:
            continue
        number = mark.kwargs.get("number")
        parts = mark.args[0] if number is not None else min(mark.args[0], num_cases[_test_of(item)])
        if (place + _sum_of_places(item) if number is None else number) % parts != int(day) % parts:
            found.add(item)
    return found


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _sum_of_places(item: pytest.Item) -> int:
    """Count parameters that are in one list as one."""
    callspec = getattr(item, "callspec", None)
    places: dict[str, int] = dict(callspec.indices) if callspec else {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for name in names[1:]:
            places.pop(name.strip(), None)
    return sum(places.values())

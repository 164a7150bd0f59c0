"""Which cases of a large matrix run on a day."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.turns import left_out

DAYS = 3
FILE = Path(__file__).resolve()
PLACES = [{"letter": letter, "number": number} for letter, number in product(range(4), range(5))]


@dataclass(frozen=True, eq=False)
class Case:
    nodeid: str
    callspec: Any
    get_closest_marker: Callable[[str], pytest.Mark | None]
    iter_markers: Callable[[str], list[pytest.Mark]]
    path: Path = FILE


def cases(
    turns: pytest.MarkDecorator | None, lists: Sequence[str] = (), places: Sequence[dict[str, int]] = PLACES
) -> list[pytest.Item]:
    made = [
        Case(
            f"{FILE}::test_it[{each}]",
            SimpleNamespace(indices=each),
            lambda name: turns and turns.mark,
            lambda name: [pytest.mark.parametrize(names, []).mark for names in lists],
        )
        for each in places
    ]
    return cast(list[pytest.Item], made)


def kept(items: list[pytest.Item], day: int) -> list[dict[str, int]]:
    left = left_out(items, ["tests"], str(day))
    return [cast(Any, item).callspec.indices for item in items if item not in left]


def test_each_case_has_one_day_and_each_day_every_value_of_every_parameter() -> None:
    days = [kept(cases(pytest.mark.turns(DAYS)), day) for day in range(DAYS)]
    assert sorted(map(str, chain(*days))) == sorted(map(str, PLACES))
    for day in days:
        for name in ("letter", "number"):
            assert {each[name] for each in day} == {each[name] for each in PLACES}


def test_parameters_of_one_list_count_once() -> None:
    places = [{"family": at, "mesh": at, "name": at} for at in range(9)]
    days = [kept(cases(pytest.mark.turns(DAYS), ["family, mesh,name"], places), day) for day in range(DAYS)]
    assert [len(day) for day in days] == [3, 3, 3]


def test_a_test_of_few_cases_has_one_on_each_day() -> None:
    for places in ([{"family": 0}], [{"family": 0}, {"family": 1}]):
        days = [kept(cases(pytest.mark.turns(DAYS), places=places), day) for day in range(2)]
        assert [len(day) for day in days] == [1, 1]


def test_a_case_may_say_its_number() -> None:
    assert [len(kept(cases(pytest.mark.turns(DAYS, number=4)), day)) for day in range(DAYS)] == [0, 20, 0]


def test_nothing_is_left_out_of_a_file_that_is_named_nor_where_every_case_is_asked_for() -> None:
    items = cases(pytest.mark.turns(DAYS))
    assert left_out(items, [str(FILE)]) == left_out(items, [f"{FILE}::test_it"]) == set()
    assert left_out(items, ["tests"], "every") == set()
    assert left_out(cases(None), ["tests"]) == set()

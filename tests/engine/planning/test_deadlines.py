"""Instants by key: the same as looking at all of them."""

from math import inf
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.planning.deadlines import Deadlines

STEPS = st.one_of(
    st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 20)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("take"), st.integers(0, 20)),
)


@given(st.lists(STEPS, max_size=300))
def test_they_come_in_order_and_each_once(steps: list[tuple[Any, ...]]) -> None:
    deadlines, plain = Deadlines[int](), dict[int, float]()
    for name, *args in steps:
        match name, args:
            case "set", [key, at]:
                deadlines.set(key, at)
                plain[key] = at
            case "drop", [key]:
                deadlines.drop(key)
                plain.pop(key, None)
            case _:
                (now,) = args
                past = {key: at for key, at in plain.items() if at <= now}
                taken = [*deadlines.take(now)]
                assert sorted(taken) == sorted(past)
                assert [past[key] for key in taken] == sorted(past.values())
                plain = {key: at for key, at in plain.items() if at > now}
        assert deadlines.next_at == min(plain.values(), default=inf)


def test_what_is_set_again_and_again_takes_no_room() -> None:
    deadlines = Deadlines[str]()
    for at in range(100_000, 0, -1):
        deadlines.set("same", at)
    assert deadlines.num_entries < 500

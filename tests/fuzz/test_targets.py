"""No input that was kept, nor any near it, is more than a parser expects. `make fuzz` searches further."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import CORPUS, TARGETS, kept

EDITS = st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=3), st.integers(0, 3)), max_size=4)
"""Places, what is put there, and how many bytes it replaces."""
_MOST_BYTES = 200_000


def edited(data: bytes, edits: list[tuple[int, bytes, int]]) -> bytes:
    for place, put, num_replaced in edits:
        at = place % (len(data) + 1)
        data = data[:at] + put + data[at + num_replaced :]
    return data


@pytest.mark.parametrize("name", TARGETS)
def test_no_kept_input_is_a_find(name: str) -> None:
    for data in kept(name):
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_near_a_kept_input_is_a_find(name: str) -> None:
    @settings(max_examples=30, deadline=None, suppress_health_check=[*HealthCheck], database=None)
    @given(st.sampled_from(kept(name)) | st.binary(max_size=200), EDITS)
    def check(data: bytes, edits: list[tuple[int, bytes, int]]) -> None:
        TARGETS[name](edited(data, edits))

    check()


def test_the_kept_inputs_are_few_and_each_belongs_to_a_target() -> None:
    files = sorted(CORPUS.iterdir())
    assert [file.stem for file in files] == sorted(TARGETS)
    assert sum(file.stat().st_size for file in files) <= _MOST_BYTES

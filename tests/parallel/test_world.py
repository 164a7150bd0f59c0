"""The processes that tests of ranks share: one test's failure is told, and is not the next test's."""

import os
import signal
from typing import Any

import pytest

from tests.parallel.world import World


def its_number(rank: int, store: Any) -> int:
    return rank


def first_fails(rank: int, store: Any) -> None:
    """The others wait for what it was to do."""
    assert rank, "a fact"
    store.wait(["done by the first"])


def last_ends(rank: int, store: Any) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def not_raised(rank: int, store: Any) -> None:
    with pytest.raises(ValueError):
        pass


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (first_fails, "(?s)rank 0: .*a fact.*rank 1 has not answered.*rank 2 has not answered"),
        (last_ends, "^rank 2: its process has ended$"),
        (not_raised, "(?s)rank [012]: .*DID NOT RAISE"),
    ],
)
def test_what_fails_is_said_and_the_next_run_has_all_ranks(world: World, work: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        world.run(3, work)
    assert world.run(4, its_number) == [0, 1, 2, 3]

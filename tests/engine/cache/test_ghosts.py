"""What the prefix cache remembers of blocks that it has given up. `test_radix` holds it against an ordered dictionary."""

from engine.cache.ghosts import Ghost, Ghosts

LIMIT = 5
ROOT = 2**64 - 1


def given_up(ghosts: Ghosts, chain: list[int], idle_since: int = 0) -> None:
    """The last of a chain first, all at once."""
    ghosts.remember([*reversed(chain)], ROOT, Ghost(0, idle_since, 1))


def test_blocks_that_went_together_come_back_one_by_one() -> None:
    ghosts = Ghosts(LIMIT)
    given_up(ghosts, [1, 2, 3])
    assert ghosts.recall([2, 3]) == [], "its prefix is not there"
    assert ghosts.recall([1, 9]) == [Ghost(0, 2, 1)]
    assert ghosts.recall([2, 3, 4]) == [Ghost(0, 1, 1), Ghost(0, 0, 1)]
    assert len(ghosts) == 0


def test_what_went_first_is_forgotten_first() -> None:
    ghosts = Ghosts(LIMIT)
    given_up(ghosts, [1, 2, 3])
    given_up(ghosts, [11, 12, 13], 10)
    given_up(ghosts, [21], 20)
    assert len(ghosts) == LIMIT
    groups, times = ghosts.groups_and_times()
    assert (groups.tolist(), times.tolist()) == ([0] * 5, [2, 10, 11, 12, 20])
    assert ghosts.recall([1, 2, 3]) == [Ghost(0, 2, 1)]
    given_up(ghosts, [31, 32, 33], 30)
    assert ghosts.recall([11, 12, 13]) == [Ghost(0, 12, 1)]


def test_more_than_may_be_remembered_at_once() -> None:
    ghosts = Ghosts(LIMIT)
    given_up(ghosts, list(range(9)))
    assert len(ghosts) == LIMIT
    assert [ghost.idle_since for ghost in ghosts.recall(list(range(9)))] == [8, 7, 6, 5, 4]


def test_a_prompt_that_goes_block_by_block_is_one_chunk() -> None:
    ghosts = Ghosts(100)
    for block in range(50, 0, -1):
        ghosts.remember([block], block - 1 or ROOT, Ghost(2, 50 - block, 3))
    assert len(ghosts._order) == 1  # type: ignore[attr-defined]
    assert ghosts.recall([1, 2]) == [Ghost(2, 49, 3), Ghost(2, 48, 3)]


def test_what_is_wanted_again_over_and_over_takes_no_more_room() -> None:
    ghosts = Ghosts(LIMIT)
    ghosts.remember([0], ROOT, Ghost(0, 0, 0))
    for number in range(1, 1000):
        ghosts.remember([number], ROOT, Ghost(1, number, number))
        assert ghosts.recall([number]) == [Ghost(1, number, number)]
    assert len(ghosts._order) < 100  # type: ignore[attr-defined]
    assert ghosts.recall([0]) == [Ghost(0, 0, 0)]
    assert not len(ghosts)

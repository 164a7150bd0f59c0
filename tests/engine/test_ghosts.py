"""What the prefix cache remembers of blocks that it has given up."""

from hypothesis import given
from hypothesis import strategies as st

from engine.ghosts import Ghost, Ghosts

LIMIT = 5
HASHES = st.integers(2**64 - 12, 2**64 - 1)


@given(st.lists(st.tuples(st.booleans(), HASHES), max_size=120))
def test_it_remembers_as_an_ordered_dictionary_would(steps: list[tuple[bool, int]]) -> None:
    ghosts, model = Ghosts(LIMIT), dict[int, Ghost]()
    for now, (comes, block_hash) in enumerate(steps):
        if comes and block_hash not in model:
            ghost = model[block_hash] = Ghost(now % 3, now, 2 * now)
            ghosts.remember(block_hash, ghost)
            if len(model) > LIMIT:
                del model[next(iter(model))]
        elif not comes:
            assert ghosts.recall(block_hash) == model.pop(block_hash, None)
        groups, times = ghosts.groups_and_times()
        assert len(ghosts) == len(model)
        assert groups.tolist() == [ghost.group for ghost in model.values()]
        assert times.tolist() == [ghost.idle_since for ghost in model.values()]


def test_what_is_wanted_again_over_and_over_takes_no_more_room() -> None:
    ghosts = Ghosts(LIMIT)
    ghosts.remember(0, Ghost(0, 0, 0))
    for number in range(1, 100):
        ghosts.remember(number, Ghost(1, number, number))
        assert ghosts.recall(number) == Ghost(1, number, number)
    assert ghosts.recall(0) == Ghost(0, 0, 0)
    assert not len(ghosts)

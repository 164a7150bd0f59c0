"""Prefix runs are what the reports say, and nothing remains of an instance that is gone."""

from cluster.scheduler.fleet.prefix_index import PrefixIndex
from cluster.scheduler.fleet.rng import RequestRng


def runs(index: PrefixIndex, hashes: tuple[int, ...]) -> dict[str, int]:
    """Lengths for all that hold any of it, longest first."""
    match = index.match(hashes)
    return {address: match.get(address) for address in match.longest(100, RequestRng("x"))}


def test_runs_stop_at_the_first_gap() -> None:
    index = PrefixIndex()
    index.update("a", added=(1, 2, 3, 4), removed=())
    index.update("b", added=(1, 2, 4), removed=())
    index.update("c", added=(2, 3), removed=())
    assert runs(index, (1, 2, 3, 4, 5)) == {"a": 4, "b": 2}


def test_no_hashes_and_unknown_hashes_have_no_runs() -> None:
    index = PrefixIndex()
    index.update("a", added=(1,), removed=())
    assert runs(index, ()) == {}
    assert runs(index, (9, 1)) == {}


def test_removed_blocks_end_a_run_and_do_not_touch_other_instances() -> None:
    index = PrefixIndex()
    index.update("a", added=(1, 2), removed=())
    index.update("b", added=(1, 2), removed=())
    index.update("a", added=(), removed=(2, 77))
    assert runs(index, (1, 2)) == {"a": 1, "b": 2}


def test_a_hash_in_both_lists_counts_as_removed() -> None:
    index = PrefixIndex()
    index.update("a", added=(1,), removed=(1,))
    assert runs(index, (1,)) == {}


def test_dropping_an_instance_leaves_nothing() -> None:
    index = PrefixIndex()
    index.update("a", added=(1, 2), removed=())
    index.update("b", added=(2, 3), removed=())
    index.drop("a")
    assert runs(index, (1, 2)) == {}
    assert len(index) == 2
    index.drop("b")
    index.drop("never seen")
    assert len(index) == 0


def test_memory_is_bounded_and_long_runs_are_still_known() -> None:
    index = PrefixIndex(max_entries=4000)
    for number in range(20):
        index.update(f"i{number}", added=_prompt(number), removed=())
        assert index.num_entries <= 4000
    assert index.stride == 8
    for number in range(20):
        run = index.match(_prompt(number)).get(f"i{number}")
        assert 900 < run <= 1000
    index.update("i3", added=(), removed=_prompt(3)[500:])
    assert 450 < index.match(_prompt(3)).get("i3") <= 500
    for number in range(20):
        index.drop(f"i{number}")
    assert index.num_entries == len(index) == 0


def test_holders_of_a_popular_prefix_are_drawn_and_the_deepest_come_first() -> None:
    index = PrefixIndex()
    for number in range(50):
        index.update(f"i{number}", added=(1, 2), removed=())
    index.update("deep", added=(1, 2, 3, 4), removed=())
    match = index.match((1, 2, 3, 4, 5))
    drawn = {address for n in range(40) for address in match.longest(3, RequestRng(f"r{n}"))}
    assert all(match.longest(3, RequestRng(f"r{n}"))[0] == "deep" for n in range(40))
    assert len(drawn) > 25


def _prompt(number: int) -> tuple[int, ...]:
    """Hashes of a thousand blocks."""
    return tuple(hash((number, block)) for block in range(1000))

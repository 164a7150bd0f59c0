"""Prefix runs are what the reports say, and nothing remains of an instance that is gone."""

from cluster.prefix_index import PrefixIndex


def test_runs_stop_at_the_first_gap() -> None:
    index = PrefixIndex()
    index.update("a", added=(1, 2, 3, 4), removed=())
    index.update("b", added=(1, 2, 4), removed=())
    index.update("c", added=(2, 3), removed=())
    assert index.runs((1, 2, 3, 4, 5)) == {"a": 4, "b": 2}


def test_no_hashes_and_unknown_hashes_have_no_runs() -> None:
    index = PrefixIndex()
    index.update("a", added=(1,), removed=())
    assert index.runs(()) == {}
    assert index.runs((9, 1)) == {}


def test_removed_blocks_end_a_run_and_do_not_touch_other_instances() -> None:
    index = PrefixIndex()
    index.update("a", added=(1, 2), removed=())
    index.update("b", added=(1, 2), removed=())
    index.update("a", added=(), removed=(2, 77))
    assert index.runs((1, 2)) == {"a": 1, "b": 2}


def test_a_hash_in_both_lists_counts_as_removed() -> None:
    index = PrefixIndex()
    index.update("a", added=(1,), removed=(1,))
    assert index.runs((1,)) == {}


def test_dropping_an_instance_leaves_nothing() -> None:
    index = PrefixIndex()
    index.update("a", added=(1, 2), removed=())
    index.update("b", added=(2, 3), removed=())
    index.drop("a")
    assert index.runs((1, 2)) == {}
    assert len(index) == 2
    index.drop("b")
    index.drop("never seen")
    assert len(index) == 0

from hypothesis import given
from hypothesis import strategies as st

from core.plan import SeqWork
from engine.ranks.microbatches import micro_batches

works = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()), max_size=12)


@given(works, st.integers(1, 6))
def test_parts_follow_each_other_and_lose_nothing(items: list[tuple[int, int, bool]], num_parts: int) -> None:
    work = [
        SeqWork(key=str(i), start=start, count=count, block_ids=(1, 2), samples=samples)
        for i, (start, count, samples) in enumerate(items)
    ]
    parts = micro_batches(work, num_parts)
    sizes = [sum(item.count for item in part) for part in parts]
    assert len(parts) == min(num_parts, sum(item.count for item in work))
    assert all(sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    for whole in work:
        pieces = [item for part in parts for item in part if item.key == whole.key]
        assert [p for piece in pieces for p in range(piece.start, piece.start + piece.count)] == list(
            range(whole.start, whole.start + whole.count)
        )
        assert [piece.samples for piece in pieces] == [False] * (len(pieces) - 1) + [whole.samples]
        assert {piece.block_ids for piece in pieces} == {whole.block_ids}


def test_a_chunk_in_which_tokens_see_later_ones_stays_whole() -> None:
    text = SeqWork(key="a", start=0, count=9, block_ids=(1,), samples=False)
    seeing = SeqWork(key="b", start=2, count=12, block_ids=(2,), samples=True, both_ways=((4, 6),))
    parts = micro_batches([text, seeing], 3)
    assert [item for part in parts for item in part if item.key == "b"] == [seeing]
    assert sum(item.count for part in parts for item in part) == 21

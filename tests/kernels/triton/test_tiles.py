"""How steps are cut into items, against the pairs that attention is over by definition."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.triton.attention_config import AttentionConfig, split_all, split_at_multiples
from kernels.triton.tiles import StepLens, cut, items_of

SEQS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300), st.booleans()), min_size=1, max_size=6)
"""Query tokens, tokens before them, and whether they see those behind them."""


@settings(deadline=None)
@given(
    seqs=SEQS,
    tokens_per_tile=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 1, 7, 100]),
    occupying=st.integers(1, 30),
    at_multiples=st.booleans(),
)
def test_items_are_over_each_token_that_a_query_sees_once(
    seqs: list[tuple[int, int, bool]], tokens_per_tile: int, window: int, occupying: int, at_multiples: bool
) -> None:
    block_n = 16
    config = AttentionConfig(block_m=16, block_n=block_n, heads=4, num_warps=4, num_stages=3)
    lens = StepLens.of(
        [query for query, _, _ in seqs],
        [before + query for query, before, _ in seqs],
        [both for _, _, both in seqs],
    )
    tiles = cut(lens, np.arange(len(seqs), dtype=np.int32), tokens_per_tile, window, block_n)
    splits = split_at_multiples(tiles, 32) if at_multiples else split_all(tiles, occupying, 2, config)
    items, split_tiles = items_of(tiles, splits)
    if not at_multiples:
        assert len(items) <= len(tiles) + 2 * occupying

    seen = dict[tuple[int, int], int]()
    results = dict[int, tuple[int, int]]()
    for seq, begin, end, row, count, first, place, both in items.tolist():
        assert 0 < count <= tokens_per_tile
        assert both == seqs[seq][2]
        if place >= 0:
            assert place not in results
            results[place] = (row, count)
        for query in range(count):
            position = first + query
            low = max(begin, position - window + 1) if window else begin
            for token in range(low, end if both else min(end, position + 1)):
                seen[row + query, token] = seen.get((row + query, token), 0) + 1
    want, row = set[tuple[int, int]](), 0
    for query, before, both in seqs:
        for position in range(before, before + query):
            low = max(0, position - window + 1) if window else 0
            want |= {(row, token) for token in range(low, before + query if both else position + 1)}
            row += 1
    assert set(seen) == want
    assert set(seen.values()) == {1}
    reduced = [
        (first + number, (row, count))
        for first, parts, _, row, count in split_tiles.tolist()
        for number in range(parts)
    ]
    assert sorted(reduced) == sorted(results.items())


@settings(deadline=None)
@given(
    lens=st.lists(st.integers(1, 200_000), min_size=1, max_size=40),
    window=st.sampled_from([0, 1, 100, 4096]),
    occupying=st.integers(1, 100),
    block_n=st.sampled_from([16, 64]),
)
def test_splits_begin_at_multiples_of_blocks_and_few_are_added(
    lens: list[int], window: int, occupying: int, block_n: int
) -> None:
    config = AttentionConfig(block_m=16, block_n=block_n, heads=4, num_warps=4, num_stages=3)
    step = StepLens.of([1] * len(lens), lens)
    tiles = cut(step, np.arange(len(lens), dtype=np.int32), 4, window, block_n)
    splits = split_all(tiles, occupying, 2, config)
    items, split_tiles = items_of(tiles, splits)
    assert len(items) <= len(lens) + 2 * occupying
    assert len(split_tiles) <= 2 * occupying
    assert items[:, 6].max() < 4 * occupying
    assert not (items[:, 1] % block_n).any()
    assert (items[:, 1] < items[:, 2]).all()


def test_queries_that_see_nothing_are_over_no_tokens() -> None:
    lens = StepLens.of([3, 9], [50, 0])
    tiles = cut(lens, np.arange(2, dtype=np.int32), 4, 0, 16)
    for splits in (split_all(tiles, 8, 1, AttentionConfig(block_m=16, block_n=16, heads=4, num_warps=4, num_stages=3)), split_at_multiples(tiles, 32)):  # fmt: skip
        items, _ = items_of(tiles, splits)
        own = items[items[:, 0] == 1]
        assert sorted(own[:, 3].tolist()) == [3, 7, 11]
        assert (own[:, 1] == own[:, 2]).all()

"""Any source layout into any destination layout: every vector once, nothing else touched."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import KVLayout, KVShard, num_blocks_for
from kvtransfer.copies import (
    CopyRun,
    Side,
    as_bytes,
    at_layer,
    chunk_runs,
    duties,
    group_vectors,
    plan_vectors,
    split_runs,
)

LAYERS, HEADS, POOL = 4, 4, 24


@dataclass(frozen=True)
class Cluster:
    """One side: its ranks' shards over PP x TP (more TP ranks than heads hold copies) and its blocks."""

    shards: list[KVShard]
    blocks: Sequence[int]


def cut(layout: KVLayout, num_stages: int, num_ranks: int) -> list[KVShard]:
    stage, heads = LAYERS // num_stages, layout.num_kv_heads
    width = max(1, heads // num_ranks)
    return [
        KVShard(layout, (pp * stage, (pp + 1) * stage), (at := tp * heads // num_ranks, at + width))
        for pp in range(num_stages)
        for tp in range(num_ranks)
    ]


def vectors(shard: KVShard, pool: bytearray) -> np.ndarray:
    """(layer, block, plane, head, slot) of the vectors' data; an element is one float32."""
    layout = shard.layout
    shape = (shard.num_layers, POOL, layout.num_planes, shard.num_heads, layout.block_size)
    return np.frombuffer(pool, np.float32)[: int(np.prod(shape))].reshape(shape)


def scales(shard: KVShard, pool: bytearray) -> np.ndarray:
    at = vectors(shard, pool).size
    return np.frombuffer(pool, np.float32)[at:].reshape(vectors(shard, pool).shape)


def value(layer: int, plane: int, head: int, token: int) -> int:
    return 1 + ((layer * 2 + plane) * HEADS + head) * 100 + token


def filled(shard: KVShard, blocks: Sequence[int], tokens: range, first: int) -> bytearray:
    """A pool with the sequence's tokens in it, zero elsewhere."""
    pool = bytearray(shard.pool_bytes(POOL))
    array, size = vectors(shard, pool), shard.layout.block_size
    for layer in range(*shard.layers):
        for plane in range(shard.layout.num_planes):
            for head in range(*shard.heads):
                for token in tokens:
                    block, slot = blocks[(token - first) // size], token % size
                    place = (layer - shard.layers[0], block, plane, head - shard.heads[0], slot)
                    array[place] = value(layer, plane, head, token)
                    if shard.layout.scale_bytes:
                        scales(shard, pool)[place] = value(layer, plane, head, token) + 0.5
    return pool


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_vector_is_written_exactly_once_and_nothing_else(data: st.DataObject) -> None:
    sizes = data.draw(st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4])))
    state = data.draw(st.sampled_from(["kv", "mla"]))
    layout = KVLayout(
        num_layers=LAYERS,
        num_kv_heads=HEADS if state == "kv" else 1,
        head_dim=1,
        block_size=1,
        dtype="float32",
        scales="none",
        state=state,
    )
    layout = replace(layout, scales=data.draw(st.sampled_from(["none", "vector"])))
    meshes = [data.draw(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]))) for _ in sizes]
    num_tokens = data.draw(st.integers(1, 20))
    start = data.draw(st.integers(0, num_tokens - 1))
    first = start // sizes[1] * sizes[1]
    sides = [
        Cluster(
            cut(replace(layout, block_size=size), *mesh),
            data.draw(st.permutations(range(POOL)))[: num_blocks_for(num_tokens - low, size)],
        )
        for size, mesh, low in zip(sizes, meshes, (0, first), strict=True)
    ]
    source, target = sides
    pools = [bytearray(shard.pool_bytes(POOL)) for shard in target.shards]
    writes = [np.zeros(len(pool), np.int8) for pool in pools]
    for shard, numbers in zip(source.shards, duties(source.shards, target.shards), strict=True):
        pool = filled(shard, source.blocks, range(num_tokens), 0)
        a = Side(shard=shard, num_blocks=POOL, block_ids=source.blocks)
        for number in numbers:
            b = Side(shard=target.shards[number], num_blocks=POOL, block_ids=target.blocks, first_token=first)
            planned = plan_vectors(a, b, start, num_tokens - start)
            for layer in range(*shard.layers):
                for run in as_bytes(at_layer(planned, a, b, layer), a, b):
                    piece = pool[run.source : run.source + run.num_bytes]
                    pools[number][run.destination : run.destination + run.num_bytes] = piece
                    writes[number][run.destination : run.destination + run.num_bytes] += 1
    for shard, pool, written in zip(target.shards, pools, writes, strict=True):
        assert pool == filled(shard, target.blocks, range(start, num_tokens), first)
        assert written.max() == 1
        per_token = shard.num_layers * shard.num_heads * layout.num_planes * (4 + layout.scale_bytes)
        assert written.sum() == (num_tokens - start) * per_token


@given(
    st.integers(1, 5),
    st.sampled_from(["kv", "mla"]),
    st.sampled_from(["none", "vector"]),
    st.data(),
)
def test_every_byte_of_a_pool_belongs_to_the_block_of_its_vector(
    block_size: int, state: str, scaling: str, data: st.DataObject
) -> None:
    layout = KVLayout(
        num_layers=3,
        num_kv_heads=2 if state == "kv" else 1,
        head_dim=8,
        block_size=block_size,
        dtype="int8",
        scales=scaling,
        state=state,
    )
    shard = KVShard.whole(layout)
    block, layer = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 2))
    size = shard.block_bytes
    at = (layer * 7 + block) * size
    assert list(shard.blocks_at(7, at, at + size)) == [block]
    if block < 6:
        assert list(shard.blocks_at(7, at + size - 1, at + size + 1)) == [block, block + 1]
    elif layer < 2:
        assert not shard.blocks_at(7, at + size - 1, at + size + 1), "no run crosses layers"
    if layout.scale_bytes:
        size = shard.block_vectors * 4
        at = shard.data_bytes(7) + (layer * 7 + block) * size
        assert list(shard.blocks_at(7, at, at + size)) == [block]
        assert not shard.blocks_at(7, shard.data_bytes(7) - 1, shard.data_bytes(7) + 1)
    end = shard.pool_bytes(7)
    for start, stop in ((-1, 1), (end - 1, end + 1), (5, 5)):
        assert not shard.blocks_at(7, start, stop)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 5), st.integers(1, 64))
def test_splitting_keeps_every_byte_in_order(sizes: list[int], num_parts: int, limit: int) -> None:
    runs: list[CopyRun] = []
    for size in sizes:
        at = runs[-1].source + runs[-1].num_bytes if runs else 0
        runs.append(CopyRun(at, at * 3, size))
    for parts in (split_runs(runs, num_parts, limit), chunk_runs(runs, limit)):
        flat = [
            (run.source + i, run.destination + i)
            for part in parts
            for run in part
            for i in range(run.num_bytes)
        ]
        assert flat == [(run.source + i, run.destination + i) for run in runs for i in range(run.num_bytes)]
    assert len(split_runs(runs, num_parts, limit)) <= num_parts
    assert all(sum(run.num_bytes for run in part) <= limit for part in chunk_runs(runs, limit))


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 9)), max_size=9),
    st.integers(1, 12),
)
def test_groups_of_vectors_have_each_of_them_in_order(
    runs: list[tuple[int, int, int]], capacity: int
) -> None:
    groups = group_vectors(np.array(runs, np.int64).reshape(-1, 3), capacity)
    flat = [(s + i, d + i) for group in groups for s, d, count in group.tolist() for i in range(count)]
    assert flat == [(s + i, d + i) for s, d, count in runs for i in range(count)]
    sizes = [int(group[:, 2].sum()) for group in groups]
    assert all(size == capacity for size in sizes[:-1])
    assert not sizes or 0 < sizes[-1] <= capacity


def test_consecutive_whole_blocks_are_one_run() -> None:
    shard = KVShard.whole(KVLayout(num_layers=2, num_kv_heads=4, head_dim=8, block_size=16, dtype="bfloat16"))
    a, b = (
        Side(shard=shard, num_blocks=99, block_ids=[5, 6, 7, 8]),
        Side(shard=shard, num_blocks=50, block_ids=[20, 21, 22, 23]),
    )
    runs = as_bytes(plan_vectors(a, b, 0, 64), a, b)
    assert len(runs) == 1
    assert runs[0].num_bytes == 4 * shard.block_bytes

"""Blocks of several ranks taken out of their pools and put back elsewhere, judged vector by vector."""

import random
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import KVLayout, KVShard, RankPool, lay_out
from engine.tiers.block_pieces import BlockPieces
from parallel.mesh import Mesh
from parallel.plans import Dims, part_of

NUM_BLOCKS = 5


@st.composite
def pools(draw: st.DrawFn) -> tuple[RankPool, ...]:
    state = draw(st.sampled_from(["kv", "mla"]))
    kv_heads, repeats = (1, 4) if state == "mla" else (draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    layout = KVLayout(
        num_layers=3,
        num_kv_heads=kv_heads,
        head_dim=4,
        block_size=2,
        dtype="float16",
        scales=draw(st.sampled_from(["none", "vector"])),
        state=state,
    )
    mesh = Mesh(draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, kv_heads * repeats)))
    dims = Dims(
        num_layers=3,
        num_heads=kv_heads * repeats,
        num_kv_heads=kv_heads,
        vocab_size=8,
        widths=(8,),
        layer_weights=(1, 1, 1),
        embedding_weights=1,
        head_weights=1,
        num_experts=2,
    )
    parts = [part_of(dims, mesh, rank) for rank in range(mesh.size)]
    return lay_out([KVShard(layout, part.layers, part.kv_heads) for part in parts], NUM_BLOCKS)


def memory_of(pools: Sequence[RankPool]) -> bytearray:
    """Vectors say which they are, of the model's and not of a rank's."""
    memory = bytearray(pools[-1].base_bytes + pools[-1].num_bytes)
    for pool in pools:
        for block in range(NUM_BLOCKS):
            for name, start, end in vectors(pool, block):
                memory[start:end] = random.Random(f"{block}{name}").randbytes(end - start)
    return memory


def vectors(pool: RankPool, block: int) -> Iterator[tuple[tuple[object, ...], int, int]]:
    """Each vector of a block, and each scale, by what it is: its bytes [start, end) of the memory."""
    shard = pool.shard
    layout, size = shard.layout, shard.layout.vector_bytes
    for layer in range(*shard.layers):
        for plane in range(layout.num_planes):
            for head in range(*shard.heads):
                for slot in range(layout.block_size):
                    at = shard.offset(NUM_BLOCKS, layer, block, plane, head, slot)
                    name = (layer, plane, head, slot)
                    yield ("vector", *name), pool.base_bytes + at, pool.base_bytes + at + size
                    scale = shard.data_bytes(NUM_BLOCKS) + at // size * layout.scale_bytes + pool.base_bytes
                    yield ("scale", *name), scale, scale + layout.scale_bytes


@settings(deadline=None)
@given(pools(), st.permutations(range(NUM_BLOCKS)))
def test_a_block_comes_back_on_every_rank_and_nothing_else_changes(
    pools: tuple[RankPool, ...], blocks: list[int]
) -> None:
    source, target = blocks[:2]
    memory = memory_of(pools)
    pieces = BlockPieces(memoryview(memory), pools)
    saved: list[bytes] = []
    pieces.save(source, saved.append)
    (content,) = saved
    assert len(content) == pieces.num_bytes
    want = bytearray(memory)
    for pool in pools:
        for (_, start, end), (_, to, to_end) in zip(
            vectors(pool, source), vectors(pool, target), strict=True
        ):
            want[to:to_end] = memory[start:end]
    pieces.scatter(target, memoryview(content))
    assert memory == want


@settings(deadline=None)
@given(pools())
def test_what_several_ranks_hold_is_kept_once(pools: tuple[RankPool, ...]) -> None:
    layout = pools[0].shard.layout
    pieces = BlockPieces(memoryview(memory_of(pools)), pools)
    assert pieces.num_bytes == layout.token_bytes * layout.block_size

"""Any source layout into any destination layout: every element once, nothing else touched."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core.kv import KVLayout, KVShard, num_blocks_for
from kvtransfer.copies import Side, as_bytes, at_layer, plan_vectors

LAYERS, HEADS, DIM, POOL = 4, 4, 2, 24


def shards(cuts: int, block_size: int, by: str) -> list[KVShard]:
    """The model's KV over `cuts` ranks, cut by layers (PP) or by heads (TP)."""
    layout = KVLayout(LAYERS, HEADS, DIM, block_size, "float32")
    step = 4 // cuts
    parts = [(i * step, (i + 1) * step) for i in range(cuts)]
    return [
        KVShard(layout, part, (0, HEADS)) if by == "pp" else KVShard(layout, (0, LAYERS), part)
        for part in parts
    ]


def view(shard: KVShard, pool: bytearray) -> np.ndarray:
    shape = (shard.num_layers, POOL, 2, shard.num_heads, shard.layout.block_size, DIM)
    return np.frombuffer(pool, np.float32).reshape(shape)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_element_is_written_exactly_once_and_nothing_else(data: st.DataObject) -> None:
    sizes = data.draw(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])))
    cuts = data.draw(st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])))
    kinds = data.draw(st.tuples(st.sampled_from(["tp", "pp"]), st.sampled_from(["tp", "pp"])))
    num_tokens = data.draw(st.integers(1, 20))
    start = data.draw(st.integers(0, num_tokens - 1))
    first = start // sizes[1] * sizes[1]
    sources, targets = (shards(c, s, k) for c, s, k in zip(cuts, sizes, kinds, strict=True))
    blocks = [
        data.draw(st.permutations(range(POOL)))[: num_blocks_for(num_tokens - low, s)]
        for s, low in zip(sizes, (0, first), strict=True)
    ]
    value = lambda layer, kv, head, token: 1 + ((layer * 2 + kv) * HEADS + head) * 100 + token  # noqa: E731
    target_pools = [bytearray(shard.pool_bytes(POOL)) for shard in targets]
    writes = [np.zeros(len(pool), np.int8) for pool in target_pools]
    for source in sources:
        pool = bytearray(source.pool_bytes(POOL))
        array = view(source, pool)
        for layer in range(*source.layers):
            for head in range(*source.heads):
                for token in range(num_tokens):
                    for kv in (0, 1):
                        place = (blocks[0][token // sizes[0]], kv, head - source.heads[0], token % sizes[0])
                        array[(layer - source.layers[0], *place)] = value(layer, kv, head, token)
        a = Side(source, POOL, blocks[0])
        for target, target_pool, written in zip(targets, target_pools, writes, strict=True):
            b = Side(target, POOL, blocks[1], first)
            runs = plan_vectors(a, b, start, num_tokens - start)
            for layer in range(*source.layers):
                for run in as_bytes(at_layer(runs, a, b, layer), a, b):
                    target_pool[run.destination : run.destination + run.num_bytes] = pool[
                        run.source : run.source + run.num_bytes
                    ]
                    written[run.destination : run.destination + run.num_bytes] += 1
    for target, pool, written in zip(targets, target_pools, writes, strict=True):
        expected = bytearray(target.pool_bytes(POOL))
        array = view(target, expected)
        for layer in range(*target.layers):
            for head in range(*target.heads):
                for token in range(start, num_tokens):
                    for kv in (0, 1):
                        block = blocks[1][(token - first) // sizes[1]]
                        array[
                            layer - target.layers[0], block, kv, head - target.heads[0], token % sizes[1]
                        ] = value(layer, kv, head, token)
        assert pool == expected
        assert set(np.unique(written)) <= {0, 1}
        assert written.sum() == (num_tokens - start) * target.num_layers * target.num_heads * 2 * DIM * 4


def test_consecutive_whole_blocks_are_one_run() -> None:
    shard = KVShard.whole(KVLayout(2, 4, 8, 16, "bfloat16"))
    a, b = Side(shard, 99, [5, 6, 7, 8]), Side(shard, 50, [20, 21, 22, 23])
    runs = as_bytes(plan_vectors(a, b, 0, 64), a, b)
    assert len(runs) == 1
    assert runs[0].num_bytes == 4 * shard.block_bytes

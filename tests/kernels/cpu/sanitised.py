"""Every function of the native library over odd sizes, without torch: for a library that AddressSanitizer and UBSan watch.

    python sanitised.py LIBRARY

Each buffer is an allocation of just its size, so that one byte too far is seen. Products are compared with numpy's."""

import sys
import threading
from ctypes import CDLL, byref, c_float, c_int, c_int64, c_void_p

import numpy as np

from kernels.cpu.layer_structs import GivenLayer, GivenMatrix, LayerStep

LIBRARY = CDLL(sys.argv[1])
LIBRARY.baton_packed_bytes.restype = c_int64
SHAPES = [(1, 1, 8), (3, 7, 33), (13, 33, 77), (25, 64, 130), (97, 40, 64), (14, 5, 1029)]
SCALES = (0, 0, 0, 0, 2, 1)
"""Formats of the scales of each layout: float32, float16 with int4, and bfloat16 with steps4."""
NUMBERS = {np.float32: 0, np.uint16: 1, np.float16: 2}
"""Formats of matrices; bfloat16 comes as its bits."""
ROUNDING = (2, 3)
"""Instruction sets that round rows to bfloat16."""
RNG = np.random.default_rng(0)


def at(array: np.ndarray | None) -> c_void_p:
    return c_void_p(None if array is None else array.ctypes.data)


def room(layout: int, matrix: np.ndarray, group: int, zero_bytes: int) -> np.ndarray:
    outputs, inputs = matrix.shape
    about = c_int64(group), c_int(zero_bytes), c_int(SCALES[layout])
    shape = c_int(layout), c_int64(outputs), c_int64(inputs), *about
    return np.empty(LIBRARY.baton_packed_bytes(*shape), np.uint8)


def product(
    isa: int, layout: int, group: int, zero_bytes: int, panels: np.ndarray, x: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    out = np.empty((len(x), len(bias)), np.float32)
    about = c_int64(group), c_int(zero_bytes), c_int(SCALES[layout])
    shape = c_int(layout), c_int64(len(bias)), c_int64(x.shape[1]), *about
    LIBRARY.baton_linear(c_int(isa), *shape, at(panels), at(x), c_int64(len(x)), at(bias), at(out), c_int(2))
    return out


def packed(layout: int, matrix: np.ndarray, group: int) -> np.ndarray:
    panels = room(layout, matrix, group, 0)
    shape = c_int(layout), c_int64(matrix.shape[0]), c_int64(matrix.shape[1]), c_int64(group)
    LIBRARY.baton_pack_floats(*shape, c_int(NUMBERS[matrix.dtype.type]), at(matrix), at(panels), c_int(2))
    return panels


def packed_whole(layout: int, matrix: np.ndarray, group: int, zero_bytes: int) -> np.ndarray:
    """With zero points of 7."""
    groups = -(-matrix.shape[1] // group)
    is_int8 = layout == 3
    steps, least, most, number = (40, -128, 127, np.int8) if is_int8 else (3, 0, 15, np.uint8)
    values = (np.rint(matrix * steps) + 7).clip(least, most).astype(number)
    scales = np.full((len(matrix), groups), 1 / steps, np.float32 if is_int8 else np.float16)
    zeros = np.full((len(matrix), groups), 7, np.float16 if zero_bytes == 2 else np.uint8)
    panels = room(layout, matrix, group, zero_bytes)
    shape = c_int(layout), c_int64(matrix.shape[0]), c_int64(matrix.shape[1]), c_int64(group)
    given = at(values), at(scales), at(zeros), at(panels)
    LIBRARY.baton_pack_whole(*shape, c_int(zero_bytes), c_int(SCALES[layout]), *given, c_int(2))
    return panels


def check(isa: int, count: int, outputs: int, inputs: int) -> None:
    rng = np.random.default_rng(outputs)
    matrix, x, bias = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((outputs, inputs), (count, inputs), (outputs,))
    )
    wanted = x.astype(np.float64) @ matrix.T + bias
    made = [(layout, 32, 0, packed(layout, matrix, 32)) for layout in (0, 1, 2, 3, 5)]
    bits = (matrix.view(np.uint32) >> 16).astype(np.uint16)
    made += [(1, 32, 0, packed(1, bits, 32)), (2, 32, 0, packed(2, matrix.astype(np.float16), 32))]
    made += [
        (layout, group, width, packed_whole(layout, matrix, group, width))
        for layout, group, width in ((3, 12, 2), (4, 8, 1), (4, 16, 2))
    ]
    made += [(5, 128, 0, packed(5, matrix, 128))]
    for (layout, group, zero_bytes, panels), most in zip(
        made, (1e-5, 0.01, 0.01, 0.05, 0.3, 0.01, 0.01, 0.1, 0.3, 0.3, 0.3), strict=True
    ):
        got = product(isa, layout, group, zero_bytes, panels, x, bias)
        off = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert off < most, (isa, layout, count, outputs, inputs, off)


def attended(isa: int, number: int, size: int, lens: list[tuple[int, int]]) -> None:
    """Grouped heads, a window, a cap and sinks over blocks of 5 tokens in any order, against numpy. Every other sequence sees its
    whole context."""
    heads, kv_heads, block_size, window, cap = 6, 2, 5, 20, 3.0
    rng = np.random.default_rng(number)
    counts = [-(-context // block_size) for _, context in lens]
    order = rng.permutation(sum(counts)).astype(np.int64)
    tables = [part.copy() for part in np.split(order, np.cumsum(counts)[:-1])]
    shape = (len(order), 2, kv_heads, block_size, size)
    pool, scales, meant = stored(number, rng.standard_normal(shape).astype(np.float32))
    starts = np.cumsum([0, *(query for query, _ in lens)])
    q = rng.standard_normal((starts[-1], heads, size)).astype(np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32)
    out = np.empty_like(q)
    contexts = np.array([context for _, context in lens])
    places = np.array([table.ctypes.data for table in tables])
    both_ways = np.arange(len(lens), dtype=np.uint8) % 2
    LIBRARY.baton_attend(
        c_int(isa), c_int(number), at(q), at(out), c_int64(heads), c_int64(kv_heads), c_int64(size), at(pool), at(scales),
        c_int64(block_size), c_int64(window), c_float(0.3), c_float(cap), at(sinks), c_int64(len(lens)), at(starts),
        at(contexts), at(places), at(both_ways), c_int(2),
    )  # fmt: skip
    for i, (query, context) in enumerate(lens):
        kv = meant[tables[i]].transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, size)
        for row in range(query):
            end = context - query + row + 1
            last = context if both_ways[i] else end
            keys, values = kv[:, :, max(0, end - window) : last].repeat(heads // kv_heads, 1)
            scores = np.einsum("hd,hld->hl", q[starts[i] + row], keys) * 0.3
            weights = np.exp(np.hstack((cap * np.tanh(scores / cap), sinks[:, None])))
            weights = (weights / weights.sum(1, keepdims=True))[:, :-1]
            wanted = np.einsum("hl,hld->hd", weights, values)
            # The instruction for products of bfloat16 rounds queries and weights.
            most = 0.03 if isa in ROUNDING and number == 1 and size % 32 == 0 else 1e-5
            assert np.abs(out[starts[i] + row] - wanted).max() < most, (isa, number, size, i, row)


def stored(number: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """A pool of float32, bfloat16 or int8, the scales of the last, and what they mean."""
    if number == 0:
        return numbers, None, numbers
    if number == 1:
        bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return bits, None, (bits.astype(np.uint32) << 16).view(np.float32)
    scales = np.abs(numbers).max(-1) / 127
    whole = np.rint(numbers / scales[..., None]).astype(np.int8)
    return whole, scales, whole * scales[..., None]


def sampled(isa: int, count: int) -> None:
    """The cumulative weights are those of numpy, in double, up to roundings next to a sample."""
    rows, words = 9, -(-count // 32)
    logits = (RNG.standard_normal((rows, count)) * 3).astype(np.float32)
    bits = RNG.integers(0, 2**32, (rows, words), np.uint32)
    bits[:, 0] |= 1
    order = np.arange(rows)[::-1].copy()
    allowed = np.unpackbits(bits[::-1].copy().view(np.uint8), axis=1, bitorder="little")[:, :count]
    tokens = np.empty(rows, np.int64)
    for heat, top_k, top_p, min_p in ((0, 0, 1, 0), (0.8, 0, 1, 0), (0.8, 3, 0.8, 0), (0.8, 0, 0.5, 0.1)):
        columns = np.array([[heat] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows, RNG.random(rows)])
        own = logits.copy()
        LIBRARY.baton_sample(
            *(c_int(isa), at(own), c_int64(rows), c_int64(count), at(columns)),
            *(at(order), at(bits), c_int64(words), c_int64(rows), at(tokens), c_int(2)),
        )
        assert (allowed[np.arange(rows), tokens] == 1).all(), (isa, count, heat, top_k)
        masked = np.where(allowed, logits, -np.inf)
        if not heat:
            assert (tokens == masked.argmax(1)).all(), (isa, count)
        elif not top_k and top_p == 1:
            sums = np.exp((masked - masked.max(1)[:, None]).astype(np.float64) / 0.8).cumsum(1)
            sums = np.hstack((np.zeros((rows, 1)), sums)) / sums[:, -1:]
            reached, number = np.arange(rows), columns[4]
            assert (sums[reached, tokens] <= number + 1e-5).all(), (isa, count)
            assert (sums[reached, tokens + 1] >= number - 1e-5).all(), (isa, count)


def between_products(isa: int, rows: int, size: int) -> None:
    """Norms, gates, and rotations into a pool of blocks of 3 tokens."""
    x, added = (RNG.standard_normal((rows, size)).astype(np.float32) for _ in range(2))
    weight, total, out = RNG.random(size).astype(np.float32), np.empty_like(x), np.empty_like(x)
    shape = c_int64(rows), c_int64(size)
    LIBRARY.baton_norm(
        c_int(isa), at(x), at(added), at(weight), c_float(1e-5), *shape, at(total), at(out), c_int(2)
    )
    wanted = (x + added) / np.sqrt(((x + added) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    assert np.abs(out - wanted).max() < 1e-4, (isa, rows, size)
    gates = np.hstack((x, added))
    for gate in range(2):
        LIBRARY.baton_gate(c_int(isa), c_int(gate), at(gates), *shape, at(out), c_int(2))
    if size % 2:
        return
    heads, kv_heads, blocks = 3, 2, -(-rows // 3)
    qkv = RNG.standard_normal((rows, heads + 2 * kv_heads, size)).astype(np.float32)
    cos, sin = np.zeros((rows, size), np.float32), np.ones((rows, size), np.float32)
    queries = np.empty((rows, heads, size), np.float32)
    pool = np.zeros((blocks, 2, kv_heads, 3, size), np.float32)
    slots = np.arange(rows)[::-1].copy()
    LIBRARY.baton_turn(
        c_int(isa), at(qkv), c_int64(rows), c_int64(heads), c_int64(kv_heads), c_int64(size), at(cos), at(sin), at(None),
        at(None), c_float(0), at(queries), at(None), c_int(0), at(pool), at(slots), c_int64(3), c_int(2),
    )  # fmt: skip
    first, second = np.split(qkv, 2, -1)
    turned = np.concatenate((-second, first), -1)
    assert (queries == turned[:, :heads]).all(), (isa, rows, size)
    for row, slot in enumerate(slots):
        keys, values = pool[slot // 3, :, :, slot % 3]
        assert (keys == turned[row, heads:-kv_heads]).all()
        assert (values == qkv[row, -kv_heads:]).all()
    if isa not in ROUNDING:
        return
    rounded = np.zeros(pool.shape, np.uint16)
    LIBRARY.baton_turn(
        c_int(isa), at(qkv), c_int64(rows), c_int64(heads), c_int64(kv_heads), c_int64(size), at(cos), at(sin), at(None),
        at(None), c_float(0), at(queries), at(None), c_int(1), at(rounded), at(slots), c_int64(3), c_int(2),
    )  # fmt: skip
    meant = (rounded.astype(np.uint32) << 16).view(np.float32)
    assert (np.abs(meant - pool) <= np.abs(pool) / 256).all(), (isa, rows, size)


HIDDEN, INNER, HEADS, KV_HEADS, SIZE, BLOCK, WINDOW = 37, 21, 4, 2, 32, 3, 7
MATRICES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
    "output": (HIDDEN, HEADS * SIZE),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
"""A layer's matrices, and their shapes."""


def given_layer(isa: int, layout: int, own: dict[str, np.ndarray]) -> GivenLayer:
    """A layer of float32 as the library takes it; its panels are added to `own`."""
    for name in MATRICES:
        own[f"{name} panels"] = packed(layout, own[name], 32)
    qkv, output, gate_up, down = (
        GivenMatrix(
            isa=isa, format=layout, outputs=shape[0], inputs=shape[1], group=32, scales=SCALES[layout],
            panels=own[f"{name} panels"].ctypes.data, bias=own[f"{name} bias"].ctypes.data,
        )
        for name, shape in MATRICES.items()
    )  # fmt: skip
    norm = own["norm"].ctypes.data
    return GivenLayer(
        qkv=qkv, output=output, gate_up=gate_up, down=down, attention_norm=norm, mlp_norm=norm, behind_mlp=norm, window=WINDOW,
        score_scale=0.3, eps=1e-5, residual_scale=0.5,
    )  # fmt: skip


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def layer_in_numpy(
    own: dict[str, np.ndarray], x: np.ndarray, pool: np.ndarray, places: list[list[tuple[int, int]]], lens: list[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The residual, and what is to be added to it. `places`: block and offset of each sequence's tokens."""

    def product(rows: np.ndarray, name: str) -> np.ndarray:
        return rows @ own[name].T + own[f"{name} bias"]

    qkv = product(normed(x, own["norm"]), "qkv").reshape(len(x), -1, SIZE)
    out, row = np.empty((len(x), HEADS, SIZE)), 0
    for (query, context), place in zip(lens, places, strict=True):
        for token in range(context - query, context):
            block, offset = place[token]
            pool[block, :, :, offset] = qkv[row, HEADS:].reshape(2, KV_HEADS, SIZE)
            seen = place[max(0, token + 1 - WINDOW) : token + 1]
            keys, values = np.stack([pool[b, :, :, o] for b, o in seen], 1).repeat(HEADS // KV_HEADS, 2)
            scores = np.exp(np.einsum("hd,lhd->hl", qkv[row, :HEADS], keys) * 0.3)
            out[row] = np.einsum("hl,lhd->hd", scores / scores.sum(1, keepdims=True), values)
            row += 1
    x = x + product(out.reshape(len(x), -1), "output") * 0.5
    gates, ups = np.split(product(normed(x, own["norm"]), "gate_up"), 2, -1)
    return x, normed(product(gates / (1 + np.exp(-gates)) * ups, "down"), own["norm"]) * 0.5


def placed(lens: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[list[tuple[int, int]]]]:
    """Tables of blocks in any order, and block and offset of each sequence's tokens."""
    counts = [-(-context // BLOCK) for _, context in lens]
    order = np.random.default_rng(len(lens)).permutation(sum(counts)).astype(np.int64)
    tables = [part.copy() for part in np.split(order, np.cumsum(counts)[:-1])]
    return tables, [
        [(int(table[i // BLOCK]), i % BLOCK) for i in range(len(table) * BLOCK)] for table in tables
    ]


def pointers(*arrays: np.ndarray) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays])


def some_layers(rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return [
        {name: numbers(*shape) / 6 for name, shape in MATRICES.items()}
        | {f"{name} bias": numbers(shape[0]) for name, shape in MATRICES.items()}
        | {"norm": numbers(HIDDEN)}
        for _ in range(2)
    ]


def all_layers(
    isa: int, layout: int, lens: list[tuple[int, int]], number: int = 0, read: list[int] | None = None
) -> None:
    """Two layers at once, over blocks of 3 tokens in any order; those of float32 are compared with numpy's. `number`: 1 with pools
    of bfloat16. `read`: of how many last rows of each sequence the results are read; None: of all."""
    rng = np.random.default_rng(layout)
    layers, (tables, places) = some_layers(rng), placed(lens)
    new = [place[context - query : context] for place, (query, context) in zip(places, lens, strict=True)]
    slots = np.array([block * BLOCK + offset for place in new for block, offset in place])
    starts, contexts = (
        np.cumsum([0, *(query for query, _ in lens)]),
        np.array([context for _, context in lens]),
    )
    counts = [query for query, _ in lens] if read is None else read
    read_starts = np.cumsum([0, *counts])
    rows = [row for end, count in zip(starts[1:], counts, strict=True) for row in range(end - count, end)]
    x, added = (rng.standard_normal((starts[-1], HIDDEN)).astype(np.float32) for _ in range(2))
    cos, sin = np.ones((starts[-1], SIZE), np.float32), np.zeros((starts[-1], SIZE), np.float32)
    pool_shape = sum(map(len, tables)), 2, KV_HEADS, BLOCK, SIZE
    pools = [rng.standard_normal(pool_shape).astype(np.float32) for _ in layers]
    wanted = x.astype(np.float64), np.zeros(x.shape)
    for own, pool in zip(layers, pools, strict=True):
        wanted = layer_in_numpy(own, wanted[0] + wanted[1], pool.astype(np.float64), places, lens)
    pools = [stored(number, pool)[0] for pool in pools]
    tables_at, pools_at, cos_at, sin_at = pointers(*tables), pointers(*pools), pointers(cos), pointers(sin)
    given = (GivenLayer * 2)(*(given_layer(isa, layout, own) for own in layers))
    step = LayerStep(
        x=x.ctypes.data, added=added.ctypes.data, rows=len(x), hidden=HIDDEN, row_isa=isa, attention_isa=isa, heads=HEADS,
        kv_heads=KV_HEADS, size=SIZE, block_size=BLOCK, sequences=len(lens), slots=slots.ctypes.data,
        query_starts=starts.ctypes.data, read_starts=read_starts.ctypes.data, context_lens=contexts.ctypes.data, tables=tables_at.ctypes.data,
        number=number, pools=pools_at.ctypes.data, cos=cos_at.ctypes.data, sin=sin_at.ctypes.data,
    )  # fmt: skip
    LIBRARY.baton_run_layers(given, c_int64(2), byref(step), c_int(2))
    for got, want in zip((x, added), wanted, strict=True):
        assert np.isfinite(got).all(), (isa, layout, lens)
        most = 0.3 if number else 1e-3
        assert layout or np.abs(got[rows] - want[rows]).max(initial=0) < most, (isa, lens)


def fed_forward(isa: int, layout: int, rows: int) -> None:
    """A layer's gated block alone."""
    own = some_layers(np.random.default_rng(rows))[0]
    layer = given_layer(isa, layout, own)
    x, out = RNG.standard_normal((rows, HIDDEN)).astype(np.float32), np.empty((rows, HIDDEN), np.float32)
    matrices = byref(layer.gate_up), byref(layer.down)
    LIBRARY.baton_feed_forward(c_int(isa), c_int(0), *matrices, at(x), c_int64(rows), at(out), c_int(2))
    gates, ups = np.split(x @ own["gate_up"].T + own["gate_up bias"], 2, -1)
    wanted = (gates / (1 + np.exp(-gates)) * ups) @ own["down"].T + own["down bias"]
    assert np.isfinite(out).all(), (isa, layout, rows)
    assert layout or np.abs(out - wanted).max() < 1e-3, (isa, rows)


def main() -> None:
    for isa in range(5):
        if LIBRARY.baton_has(c_int(isa)):
            for shape in SHAPES:
                check(isa, *shape)
            for number in range(3):
                attended(isa, number, 16, [(1, 1), (1, 47), (7, 7), (40, 61), (1, 32)])
                attended(isa, number, 48, [(3, 90)])
                attended(isa, number, 64, [(1, 1), (1, 47), (40, 61), (3, 97)])
            for count in (1, 31, 33, 1024, 2057):
                sampled(isa, count)
            for rows, size in ((1, 2), (7, 33), (5, 66), (40, 1024)):
                between_products(isa, rows, size)
            for layout in (0, 1, 2, 3, 5):
                for lens in ([(1, 1)], [(1, 8), (3, 5), (1, 17)], [(1, 4), (26, 30)]):
                    all_layers(isa, layout, lens)
                    if isa in ROUNDING:
                        all_layers(isa, layout, lens, number=1)
                all_layers(isa, layout, [(4, 8), (3, 5), (101, 117)], read=[1, 0, 2])
                all_layers(isa, layout, [(4, 8), (3, 5)], read=[0, 0])
                for rows in (1, 13, 97, 200):
                    fed_forward(isa, layout, rows)
            memory = np.ones(300_001, np.uint8)
            for layout in range(6):
                LIBRARY.baton_spin(c_int(isa), c_int(layout), c_int64(3))
            LIBRARY.baton_read(c_int(isa), at(memory), c_int64(memory.size), c_int(2))
    callers = [threading.Thread(target=check, args=(0, 13, 133, 77)) for _ in range(4)]
    callers += [threading.Thread(target=all_layers, args=(0, 0, [(1, 8), (14, 21)])) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    print("clean")  # noqa: T201


main()

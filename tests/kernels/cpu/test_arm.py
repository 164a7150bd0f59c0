"""The kernels for ARM, run by qemu, against those for AVX2 on this machine: the same inputs give the same bits.

They need Debian's `g++-aarch64-linux-gnu` and `qemu-user`. The first run compiles for about two minutes."""

import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.cpu.build import build_once, cache_folder
from kernels.cpu.layer_structs import LayerStep
from kernels.cpu.library import Isa, instruction_sets, loaded
from tests.kernels.cpu.arm_inputs import (
    BF16,
    BLOCK,
    F16,
    F32,
    FROM_FLOATS,
    HEADS,
    HIDDEN,
    INT4,
    INT8,
    KV_HEADS,
    SCALES,
    SIZE,
    at,
    bits,
    group_of,
    layer,
    packed,
    random,
    stored,
    whole_numbers,
)
from tests.kernels.cpu.other_machine import OtherMachine, SharedMemory

COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
MISSING = [name for name in (COMPILER, QEMU) if shutil.which(name) is None]
CALLS = Path(__file__).with_name("arm_calls.cpp")
BEHIND_8_0 = re.compile(r"\t([su]dot|cas[alp]|ld(add|clr|eor|set)[al]|swp[al]|ldapr)")
SHAPES = [(1, 1, 8), (3, 7, 33), (6, 33, 77), (13, 96, 130), (29, 40, 256), (2, 14, 1029)]
"""(rows, outputs, inputs)"""
Body = Callable[[Any, int], list[np.ndarray]]

pytestmark = [
    pytest.mark.skipif(
        platform.machine() != "x86_64" or not instruction_sets(), reason="kernels for AVX2 are what others are compared with"
    ),
    pytest.mark.skipif(bool(MISSING), reason=f"ARM's kernels need {' and '.join(MISSING)}: .ci/apt.txt names the packages"),
    pytest.mark.timeout(400),
]  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Path:
    return build_once(cache_folder(), compiler=[COMPILER], machine="aarch64")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("arm") / "arm_calls"
    subprocess.run(
        [COMPILER, "-std=c++17", "-O1", str(CALLS), "-ldl", "-o", str(made)], check=True, timeout=100
    )
    return made


@pytest.fixture(scope="module")
def whole_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedMemory]:
    made = SharedMemory(tmp_path_factory.mktemp("shared") / "memory")
    yield made
    made.close()


@pytest.fixture
def memory(whole_memory: SharedMemory) -> SharedMemory:
    whole_memory.forget()
    return whole_memory


def emulator(processor: str) -> list[str]:
    return [QEMU, "-cpu", processor, "-L", SYSROOT]


@pytest.fixture(scope="module")
def arm(library: Path, calls: Path, whole_memory: SharedMemory) -> Iterator[OtherMachine]:
    with OtherMachine(emulator("neoverse-n1"), calls, library, whole_memory) as found:
        yield found


@pytest.fixture(scope="module")
def same(arm: OtherMachine) -> Callable[[Body], list[np.ndarray]]:
    """Computes with both, and compares each array that they return bit by bit."""

    def computed(body: Body) -> list[np.ndarray]:
        wanted, got = body(loaded(), Isa.AVX2), body(arm, Isa.NEON)
        for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
            assert np.array_equal(one.view(np.uint8), other.view(np.uint8)), (number, difference(one, other))
        return wanted

    return computed


def difference(one: np.ndarray, other: np.ndarray) -> str:
    places = np.flatnonzero(one.ravel() != other.ravel())
    return f"{len(places)} of {one.size}, first {one.ravel()[places[:3]]} and {other.ravel()[places[:3]]}"


@pytest.mark.parametrize("layout", FROM_FLOATS)
def test_matrices_are_packed_byte_for_byte(memory: SharedMemory, same: Any, layout: int) -> None:
    numbers = np.random.default_rng(0).standard_normal((70, 333)).astype(np.float32)
    numbers[3], numbers[4] = 0, numbers[4] * 1e-40
    numbers[5] *= 1e30
    numbers[6, 7] = -np.inf
    numbers[6, 200] = np.nan
    numbers[7, :] = np.arange(333) / 2
    with np.errstate(over="ignore"):
        given = memory.put(numbers), memory.put(bits(numbers)), memory.put(numbers.astype(np.float16))

    for kind, matrix in enumerate(given):
        group = group_of(layout, 333) if kind else 64
        same(lambda lib, _, m=matrix, k=kind, g=group: [packed(memory, lib, layout, m, g, k)])


@pytest.mark.parametrize(("layout", "group", "width"), [(INT8, 12, 2), (INT8, 64, 0), (INT4, 16, 1), (INT4, 64, 2), (INT4, 32, 0)])  # fmt: skip
@pytest.mark.parametrize("kind", [F32, BF16, F16])
def test_a_checkpoint_s_whole_numbers_are_packed_multiplied_and_read(
    memory: SharedMemory, same: Any, layout: int, group: int, width: int, kind: int
) -> None:
    values, scales, zeros = whole_numbers(memory, layout, (40, 203), group, width, kind)
    x, bias = random(memory, 29, 203), random(memory, 40)
    rows = memory.put(np.array([0, 39, 7]))

    def body(lib: Any, isa: int) -> list[np.ndarray]:
        shape = layout, 40, 203, group, width, kind
        panels = memory.room(lib.baton_packed_bytes(*shape), np.uint8)
        lib.baton_pack_whole(*shape, at(values), at(scales), at(zeros), at(panels), 1)
        read, found = memory.room((3, 203), np.float32), [panels]
        assert lib.baton_rows(*shape, at(panels), at(rows), 3, at(read), 1) == 3
        for count in (1, 2, 5, 12, 29):
            out = memory.room((count, 40), np.float32)
            lib.baton_linear(isa, *shape, at(panels), at(x), count, at(bias), at(out), 1)
            found.append(out)
        return [*found, read]

    same(body)


@pytest.mark.parametrize("layout", FROM_FLOATS)
@pytest.mark.parametrize(("count", "outputs", "inputs"), SHAPES)
def test_products_have_the_same_bits(
    memory: SharedMemory, same: Any, layout: int, count: int, outputs: int, inputs: int
) -> None:
    matrix, x, bias = random(memory, outputs, inputs), random(memory, count, inputs), random(memory, outputs)
    x[-1] *= 1e-30

    def body(lib: Any, isa: int) -> list[np.ndarray]:
        found = []
        for group, own in product({group_of(layout, inputs), 128}, (None, bias)):
            panels = packed(memory, lib, layout, matrix, group)
            out = memory.room((count, outputs), np.float32)
            shape = layout, outputs, inputs, group, 0, SCALES[layout]
            lib.baton_linear(isa, *shape, at(panels), at(x), count, at(own), at(out), 2)
            found.append(out)
        return found

    assert all(np.isfinite(one).all() and one.any() for one in same(body))


def test_the_largest_bytes_do_not_overflow(memory: SharedMemory, same: Any) -> None:
    x = memory.put(np.full((5, 4096), 3.0, np.float32))
    values, scales = memory.put(np.full((40, 4096), -128, np.int8)), memory.put(np.ones(40, np.float32))

    def body(lib: Any, isa: int) -> list[np.ndarray]:
        shape = INT8, 40, 4096, 4096, 0, F32
        panels, out = memory.room(lib.baton_packed_bytes(*shape), np.uint8), memory.room((5, 40), np.float32)
        lib.baton_pack_whole(*shape, at(values), at(scales), 0, at(panels), 1)
        lib.baton_linear(isa, *shape, at(panels), at(x), 5, 0, at(out), 1)
        return [out]

    [got] = same(body)
    assert (got == -3.0 * 128 * 4096).all()


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(("size", "window", "cap"), [(8, 0, 0.0), (24, 20, 3.0), (64, 0, 2.5), (80, 35, 0.0)])
def test_attention_has_the_same_bits(
    memory: SharedMemory, same: Any, number: int, size: int, window: int, cap: float
) -> None:
    lens, heads, kv_heads, block = [(1, 1), (1, 47), (11, 61), (3, 90)], 6, 2, 5
    counts = [-(-context // block) for _, context in lens]
    rng = np.random.default_rng(size)
    order = rng.permutation(sum(counts)).astype(np.int64)
    tables = [memory.put(part) for part in np.split(order, np.cumsum(counts)[:-1])]
    numbers = rng.standard_normal((len(order), 2, kv_heads, block, size)).astype(np.float32)
    pool, scales = stored(memory, number, numbers)
    starts = memory.put(np.cumsum([0, *(query for query, _ in lens)]))
    contexts, places = (
        memory.put(np.array(each)) for each in ([len_ for _, len_ in lens], list(map(at, tables)))
    )
    q, sinks = random(memory, starts[-1], heads, size), random(memory, heads)
    both_ways = memory.put(np.arange(len(lens), dtype=np.uint8) % 2)

    def body(lib: Any, isa: int) -> list[np.ndarray]:
        found = []
        for sink, ways in ((None, None), (sinks, both_ways)):
            out = memory.room(q.shape, np.float32)
            lib.baton_attend(
                isa, number, at(q), at(out), heads, kv_heads, size, at(pool), at(scales), block, window, 0.3, cap, at(sink),
                len(lens), at(starts), at(contexts), at(places), at(ways), 2,
            )  # fmt: skip
            found.append(out)
        return found

    assert all(np.isfinite(one).all() and one.any() for one in same(body))


@pytest.mark.parametrize(("rows", "size"), [(1, 2), (7, 34), (5, 66), (3, 1024)])
def test_norms_gates_and_rotations_have_the_same_bits(
    memory: SharedMemory, same: Any, rows: int, size: int
) -> None:
    x, added, both = (random(memory, rows, each, seed=i) for i, each in enumerate((size, size, 2 * size)))
    both *= 20
    weight, heads, kv_heads = random(memory, size), 3, 2
    qkv = random(memory, rows, heads + 2 * kv_heads, size)
    angles = random(memory, rows, size)
    cos, sin, slots = (
        memory.put(np.cos(angles)),
        memory.put(np.sin(angles)),
        memory.put(np.arange(rows)[::-1].copy()),
    )

    def body(lib: Any, isa: int) -> list[np.ndarray]:
        total, normed, silu, gelu = (memory.room((rows, size), np.float32) for _ in range(4))
        lib.baton_norm(isa, at(x), at(added), at(weight), 1e-5, rows, size, at(total), at(normed), 1)
        for gate, out in enumerate((silu, gelu)):
            lib.baton_gate(isa, gate, at(both), rows, size, at(out), 1)
        queries = memory.room((rows, heads, size), np.float32)
        pool = memory.room((-(-rows // 3), 2, kv_heads, 3, size), np.float32)
        lib.baton_turn(
            isa, at(qkv), rows, heads, kv_heads, size, at(cos), at(sin), at(weight), at(weight), 1e-6, at(queries), 0, 0,
            at(pool), at(slots), 3, 1,
        )  # fmt: skip
        return [total, normed, silu, gelu, queries, pool]

    assert all(np.isfinite(one).all() and one.any() for one in same(body))


@pytest.mark.parametrize("count", [5, 33, 1024, 5003])
def test_the_same_tokens_are_sampled(memory: SharedMemory, same: Any, count: int) -> None:
    rows, words = 7, -(-count // 32)
    logits = random(memory, rows, count) * 4
    logits[0, 3] = np.nan
    rng = np.random.default_rng(count)
    masks = memory.put(rng.integers(0, 2**32, (rows, words), np.uint32) | np.uint32(1))
    order = memory.put(np.arange(rows)[::-1].copy())
    heats = [(0, 0, 1, 0), (0.8, 0, 1, 0), (0.8, 3, 0.8, 0), (1.3, 0, 0.5, 0.1), (0.7, 40, 0.95, 0.02)]
    columns = [
        memory.put(np.array([[value] * rows for value in heat] + [rng.random(rows)])) for heat in heats
    ]

    def body(lib: Any, isa: int) -> list[np.ndarray]:
        found = []
        for own, masked in product(columns, (0, rows)):
            given, tokens = memory.put(logits), memory.room(rows, np.int64)
            shape = rows, count, at(own), at(order), at(masks), words, masked
            lib.baton_sample(isa, at(given), *shape, at(tokens), 1)
            found += [tokens, given]
        return found

    same(body)


@pytest.mark.parametrize("layout", FROM_FLOATS)
def test_whole_layers_and_their_gated_blocks_have_the_same_bits(
    memory: SharedMemory, same: Any, layout: int
) -> None:
    lens = [(1, 8), (3, 5), (21, 30)]
    counts = [-(-context // BLOCK) for _, context in lens]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int64)
    tables = [memory.put(part) for part in np.split(order, np.cumsum(counts)[:-1])]
    slots = [
        int(table[token // BLOCK]) * BLOCK + token % BLOCK
        for table, (query, context) in zip(tables, lens, strict=True)
        for token in range(context - query, context)
    ]
    starts, read = np.cumsum([0, *(query for query, _ in lens)]), np.array([0, 1, 1, 3])
    given = [
        memory.put(np.array(each))
        for each in (slots, starts, read, [length for _, length in lens], list(map(at, tables)))
    ]
    rows = len(slots)
    hidden, cos, sin = (
        random(memory, rows, HIDDEN),
        random(memory, rows, SIZE),
        random(memory, rows, SIZE, seed=1),
    )
    kept = random(memory, len(order), 2, KV_HEADS, BLOCK, SIZE)

    def body(lib: Any, isa: int) -> list[np.ndarray]:
        layers = [layer(memory, lib, isa, layout, gate) for gate in range(2)]
        x, added, pools = (
            memory.put(hidden),
            memory.room(hidden.shape, np.float32),
            [memory.put(kept) for _ in layers],
        )
        out = memory.room(hidden.shape, np.float32)
        matrices = [memory.structures([each]) for each in (layers[0].gate_up, layers[0].down)]
        lib.baton_feed_forward(isa, 0, *matrices, at(hidden), rows, at(out), 2)
        addresses = [at(memory.put(np.array([at(one) for one in each]))) for each in (pools, [cos], [sin])]
        named = dict(
            zip(
                ("slots", "query_starts", "read_starts", "context_lens", "tables"),
                map(at, given),
                strict=True,
            )
        )
        step = LayerStep(
            x=at(x), added=at(added), rows=rows, hidden=HIDDEN, row_isa=isa, attention_isa=isa, heads=HEADS, kv_heads=KV_HEADS,
            size=SIZE, block_size=BLOCK, sequences=len(lens), **named, number=0,
            **dict(zip(("pools", "cos", "sin"), addresses, strict=True)),
        )  # fmt: skip
        lib.baton_run_layers(memory.structures(layers), 2, memory.structures([step]), 2)
        last = [
            row
            for end, count in zip(starts[1:], np.diff(read), strict=True)
            for row in range(end - count, end)
        ]
        return [out, x[last], added, *pools]

    assert all(np.isfinite(one).all() and one.any() for one in same(body))


def test_memory_is_read_and_registers_multiply(memory: SharedMemory, arm: OtherMachine) -> None:
    words = memory.put(np.arange(100_000, dtype=np.uint8))
    assert arm.baton_read(Isa.NEON, at(words), words.size, 2) == loaded().baton_read(
        Isa.AVX2, at(words), words.size, 1
    )
    assert all(arm.baton_spin(Isa.NEON, layout, 3) > 0 for layout in range(6))


def test_the_library_says_what_the_processor_has(
    memory: SharedMemory, arm: OtherMachine, calls: Path, library: Path
) -> None:
    assert [isa for isa in Isa if arm.baton_has(isa)] == [Isa.NEON]
    assert arm.baton_lanes(Isa.NEON) == 8
    assert arm.baton_tiles() == 0
    assert not loaded().baton_has(Isa.NEON)
    with OtherMachine(emulator("cortex-a72"), calls, library, memory) as without_dot_products:
        assert not any(without_dot_products.baton_has(isa) for isa in Isa)
        assert without_dot_products.baton_packed_bytes(F32, 32, 8, 0, 0, F32) == 32 * 8 * 4


def test_a_byte_too_far_ends_the_process(memory: SharedMemory, calls: Path, library: Path) -> None:
    x, weight, out = (random(memory, 33) for _ in range(3))
    with OtherMachine(emulator("max"), calls, library, memory) as other:
        other.baton_norm(Isa.NEON, at(x), 0, at(weight), 1e-5, 1, 33, 0, at(out), 1)
        with pytest.raises(AssertionError, match="baton_norm ended the process"):
            other.baton_norm(Isa.NEON, at(x), 0, at(weight), 1e-5, 1, 34, 0, at(out), 1)


def test_functions_that_all_files_share_run_on_every_arm_of_64_bits(library: Path) -> None:
    names = subprocess.check_output(
        ["aarch64-linux-gnu-nm", "--defined-only", str(library)], text=True
    ).splitlines()
    shared = {name for _, kind, name in map(str.split, names) if kind in "WVu"}
    assert shared
    code = subprocess.check_output(
        ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(library)], text=True
    )
    found = {name for name, body in re.findall(r"<(\S+)>:\n((?:.+\n)+)", code) if BEHIND_8_0.search(body)}
    assert found, "the kernels themselves"
    assert not found & shared

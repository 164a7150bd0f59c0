"""Products and attention by tiles: on the processor's own or, where it has none, on an emulation of their instructions."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu import attention, library
from kernels.cpu.attention import attend
from kernels.cpu.library import Isa
from kernels.cpu.linear import Layout, Panels, packed, packed_int4, packed_int8
from tests.instruction_sets import up_to
from tests.kernels.paged_step import make_step

pytestmark = pytest.mark.skipif(
    Isa.AMX not in library.instruction_sets(), reason="tiles need AVX-512 with BF16 beside them"
)
ROOT = Path(__file__).resolve().parents[3]
COUNTS = (1, 7, 8, 15, 16, 17, 31, 32, 33, 49, 100, 300)
"""Rows: below, at and above the numbers from which on tiles are used, and of one tile, two and several blocks of them."""
SAYS = "from kernels.cpu.library import *; print(tiles(), *(isa.name for isa in instruction_sets()))"


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def as_the_manual_adds_up(x: Tensor, weight: Tensor) -> Tensor:
    """TDPBF16PS in Intel's manual, 32 inputs at a time. A product of two bfloat16 is exact in float64, so that a sum with it is
    rounded as a fused one is."""
    rows, columns = (flushed(each.bfloat16().float().numpy()) for each in (x, weight))
    sums = np.zeros((len(rows), len(columns)), np.float32)
    for first in range(0, rows.shape[1], 32):
        halves = np.zeros((2, *sums.shape), np.float32)
        for k in range(first, min(first + 32, rows.shape[1])):
            product = rows[:, k, None].astype(np.float64) * columns[None, :, k]
            halves[k % 2] = flushed((halves[k % 2] + product).astype(np.float32))
        sums = flushed(sums + flushed(halves[0] + halves[1]))
    return torch.from_numpy(sums)


@pytest.mark.parametrize(("count", "outputs", "inputs"), [(1, 33, 64), (17, 40, 331), (33, 70, 1100)])
def test_products_of_bfloat16_have_the_bits_that_intel_s_manual_defines(
    count: int, outputs: int, inputs: int
):
    x, weight = random(count, inputs), random(outputs, inputs)
    weight[:, 5], x[0, 5] = 1.0, 1e-39
    weight[1], x[-1] = weight[1] * 1e-20, x[-1] * 1e-19
    got, want = (
        packed(weight, Layout.BFLOAT16, isa=Isa.AMX).product(x, None),
        as_the_manual_adds_up(x, weight),
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if library.tiles() == "processor" and not torch.equal(got, want):
        pytest.xfail(
            "this processor adds up in another order than the manual: its bits are not the emulation's"
        )
    assert torch.equal(got, want)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("outputs", [64, 330])
def test_a_row_of_bfloat16_has_the_same_bits_in_any_batch(outputs: int, has_bias: bool):
    """There are more inputs than are multiplied at once for many rows."""
    weight, x = packed(random(outputs, 1340), Layout.BFLOAT16, isa=Isa.AMX), random(300, 1340)
    bias = random(outputs) if has_bias else None
    whole = weight.product(x, bias)
    for count in (1, 16, 31, 33, 257):
        assert torch.equal(torch.cat([weight.product(part, bias) for part in x.split(count)]), whole)


def in_groups(group: int, *, has_zeros: bool) -> Callable[[int, int, Isa], Panels]:
    def made(outputs: int, inputs: int, isa: Isa) -> Panels:
        groups = -(-inputs // group)
        zeros = integers(-9, 9, outputs, groups) if has_zeros else None
        values = integers(-128, 128, outputs, inputs).to(torch.int8)
        return packed_int8(values, random(outputs, groups).half(), zeros, group, isa)

    return made


def in_nibbles(group: int, zeros_of: torch.dtype | None) -> Callable[[int, int, Isa], Panels]:
    def made(outputs: int, inputs: int, isa: Isa) -> Panels:
        groups = -(-inputs // group)
        zeros = None if zeros_of is None else (integers(0, 33, outputs, groups) / 2).to(zeros_of)
        values = integers(0, 16, outputs, inputs).byte()
        return packed_int4(values, random(outputs, groups).bfloat16(), zeros, group, isa)

    return made


def in_steps(group: int) -> Callable[[int, int, Isa], Panels]:
    return lambda outputs, inputs, isa: packed(random(outputs, inputs), Layout.STEPS4, group, isa)


BYTES: dict[str, Callable[[int, int, Isa], Panels]] = {
    "int8": lambda outputs, inputs, isa: packed(random(outputs, inputs), Layout.INT8, isa=isa),
    "int8 in groups of 12 with zero points": in_groups(12, has_zeros=True),
    "int8 in groups of 68": in_groups(68, has_zeros=False),
    "int8 in groups of 96": in_groups(96, has_zeros=True),
    "int4 in groups of 32": in_nibbles(32, None),
    "int4 in groups of 128 with zero points": in_nibbles(128, torch.uint8),
    "int4 in groups of 32 with zero points of float16": in_nibbles(32, torch.float16),
    "int4 with one group": in_nibbles(4096, None),
    "steps in spans of 32": in_steps(32),
    "steps in spans of 256": in_steps(256),
}


@pytest.mark.parametrize("make", BYTES.values(), ids=BYTES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (33, 77), (70, 520), (300, 64)])
def test_products_of_bytes_have_the_bits_that_vectors_give_them(
    make: Callable[[int, int, Isa], Panels], outputs: int, inputs: int
):
    by_tiles, by_vectors = (make(outputs, inputs, isa) for isa in (Isa.AMX, Isa.AVX512))
    assert torch.equal(by_tiles.data, by_vectors.data)
    for count in COUNTS:
        x, bias = random(count, inputs), random(outputs) if count % 2 else None
        assert torch.equal(by_tiles.product(x, bias), by_vectors.product(x, bias)), count


def test_the_largest_sums_of_bytes_do_not_overflow():
    inputs = 65_536
    x = torch.full((16, inputs), 3.0)
    for value in (-128, 127):
        values = torch.full((33, inputs), value, dtype=torch.int8)
        got = packed_int8(values, torch.ones(33, 1), isa=Isa.AMX).product(x, None)
        assert torch.equal(got, torch.full_like(got, 3.0 * value * inputs))


def test_what_is_stored_before_a_window_changes_no_bit():
    step = make_step([(5, 200)], heads=(6, 2), head_dim=64, block_size=16, dtype=torch.bfloat16)
    wanted = attend(step.q, step.kv_layer, step.meta, 0.2, 40, 0.0, None, Isa.AMX)
    [table] = step.meta.block_tables
    for token in range(195 - 40 + 1):
        step.kv_layer[table[token // 16], :, :, token % 16] = torch.nan
    assert torch.equal(attend(step.q, step.kv_layer, step.meta, 0.2, 40, 0.0, None, Isa.AMX), wanted)


def test_tiles_multiply_16_bits_and_fewer_where_they_may():
    with up_to(Isa.AMX):
        assert library.fastest_of_bfloat16() == library.fastest_of_bytes() == Isa.AMX
        assert library.fastest_exact() == Isa.AVX512
        assert (
            packed(random(40, 64), Layout.INT8).isa
            == packed(random(40, 64), Layout.STEPS4, 32).isa
            == Isa.AMX
        )
        assert packed(random(40, 64), Layout.BFLOAT16).isa == Isa.AVX512, (
            "who asks for nothing gets exact products"
        )
        assert attention.fastest(64, torch.bfloat16) == Isa.AMX
        assert attention.fastest(64) == Isa.AVX512
    with up_to(Isa.AVX512):
        assert library.fastest_of_bytes() == Isa.AVX512


def test_nobody_gets_emulated_tiles_who_does_not_ask():
    environment = {name: value for name, value in os.environ.items() if name != "BATON_EMULATE_TILES"}
    done = subprocess.run(
        [sys.executable, "-c", SAYS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
    )  # fmt: skip
    tiles, *names = done.stdout.split()
    assert tiles in ("none", "processor")
    assert ("AMX" in names) == (tiles == "processor")

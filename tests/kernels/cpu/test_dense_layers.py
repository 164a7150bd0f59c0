"""All layers of a dense decoder in one native call have the bits of their operations one by one, on every instruction set of this
processor."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.attention import attend
from kernels.cpu.dense_layers import fuse
from kernels.cpu.elementwise import add_norm_with, gate_with, norm_with, turn_with
from kernels.cpu.linear import Layout, Panels, packed, packed_int4, packed_int8
from kernels.cpu.prepacked import in_panels
from kernels.ops import AttentionMeta, AttentionPart, DenseLayer, Gate, KVLayer, MlpPart, ScaledKV
from kernels.packed import LinearWeight, Prepacked
from tests.kernels.paged_step import make_step

pytestmark = pytest.mark.skipif(not library.instruction_sets(), reason="there are no native kernels here")
HIDDEN, INNER, HEADS, KV_HEADS, SIZE, EPS = 72, 2100, 6, 2, 32, 1e-5
STEPS: dict[str, list[tuple[int, int]]] = {
    "one": [(1, 40)],
    "two": [(1, 7), (1, 90)],
    "eight": [(1, 5 * i + 1) for i in range(8)],
    "drafts": [(3, 20), (1, 9), (5, 5)],
    "a prompt": [(1, 3), (199, 230)],
}
Rotation = tuple[Tensor, Tensor]


@pytest.fixture(params=list(library.Isa), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> library.Isa:
    if request.param not in library.instruction_sets():
        pytest.skip(f"this processor has no {request.param.name}")
    return request.param


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def panels_of(layout: Layout, matrix: Tensor, isa: library.Isa) -> Panels:
    if layout != Layout.INT4:
        return packed(matrix, layout, 32, isa)
    groups = -(-matrix.shape[1] // 16)
    values, zeros = (
        (matrix * 8 + 8).round().clamp(0, 15).byte(),
        torch.randint(6, 11, (len(matrix), groups)).byte(),
    )
    return packed_int4(values, torch.rand(len(matrix), groups) / 50, zeros, 16, isa)


def layer(layout: Layout, isa: library.Isa, index: int) -> DenseLayer:
    """The first of three is as simple as can be; the others have all that a layer may have."""
    is_simple = not index

    def matrix(outputs: int, inputs: int) -> LinearWeight:
        return in_panels(panels_of(layout, torch.randn(outputs, inputs) / inputs**0.5, isa))

    def optional(size: int) -> Tensor | None:
        return None if is_simple else torch.randn(size)

    gate: Gate = "silu" if is_simple else "gelu_tanh"
    qkv = (HEADS + 2 * KV_HEADS) * SIZE
    return DenseLayer(
        attention=AttentionPart(
            norm=torch.rand(HIDDEN),
            qkv=matrix(qkv, HIDDEN),
            qkv_bias=optional(qkv),
            head_dim=SIZE,
            head_norms=None if is_simple else (torch.rand(SIZE), torch.rand(SIZE), 1e-6),
            rotation=index % 2,
            scale=0.3,
            window=0 if is_simple else 33,
            soft_cap=0.0 if is_simple else 4.0,
            sinks=optional(HEADS),
            out=matrix(HIDDEN, HEADS * SIZE),
            out_bias=optional(HIDDEN),
            norm_behind=None if is_simple else torch.rand(HIDDEN),
        ),
        mlp=MlpPart(
            norm=torch.rand(HIDDEN),
            gate_up=matrix(2 * INNER, HIDDEN),
            gate_up_bias=optional(2 * INNER),
            gate=gate,
            down=matrix(HIDDEN, INNER),
            down_bias=optional(HIDDEN),
            norm_behind=None if is_simple else torch.rand(HIDDEN),
        ),
        eps=EPS,
        residual_scale=1.0 if is_simple else 0.6,
    )


def never(*given: object) -> Any:
    raise AssertionError("the native kernel computes this")


def product(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    assert isinstance(weight, Prepacked)
    return weight.product(x, bias)


def one_by_one(
    layers: Sequence[DenseLayer],
    x: Tensor,
    rotations: Sequence[Rotation],
    kv: Sequence[KVLayer],
    meta: AttentionMeta,
    isa: library.Isa,
) -> tuple[Tensor, Tensor]:
    """As `models.layers.layer.Layer` computes them."""
    norm, add_norm, turn = norm_with(isa, never), add_norm_with(isa, never), turn_with(isa, never)
    gates = {"silu": gate_with(isa, 0, never), "gelu_tanh": gate_with(isa, 1, never)}
    added: Tensor | None = None

    def finished(out: Tensor, bias: Tensor | None, norm_behind: Tensor | None, scale: float) -> Tensor:
        out = out if bias is None else out + bias
        out = out if norm_behind is None else norm(out, norm_behind, EPS)
        return out if scale == 1.0 else out * scale

    for own, pool in zip(layers, kv, strict=True):
        part, mlp, scale = own.attention, own.mlp, own.residual_scale
        if added is None:
            normed = norm(x, part.norm, EPS)
        else:
            x, normed = add_norm(added, x, part.norm, EPS)
        qkv = product(normed, part.qkv, part.qkv_bias)
        q = turn(qkv, *rotations[part.rotation], part.head_norms, pool, meta)
        attended = attend(q, pool, meta, part.scale, part.window, part.soft_cap, part.sinks, isa)
        out = finished(product(attended.flatten(1), part.out, None), part.out_bias, part.norm_behind, scale)
        x, normed = add_norm(out, x, mlp.norm, EPS)
        inner = gates[mlp.gate](product(normed, mlp.gate_up, mlp.gate_up_bias))
        added = finished(product(inner, mlp.down, None), mlp.down_bias, mlp.norm_behind, scale)
    assert added is not None
    return x, added


def step_of(
    lens: list[tuple[int, int]], num_layers: int
) -> tuple[Tensor, list[Rotation], list[Tensor], AttentionMeta]:
    """Rows, two rotations, each layer's KV, and which blocks are whose."""
    made = [make_step(lens, heads=(HEADS, KV_HEADS), head_dim=SIZE, seed=seed) for seed in range(num_layers)]
    # The blocks of the first are those of all: what else is in them are numbers as well.
    meta, rows = made[0].meta, sum(query for query, _ in lens)
    slots = [
        int(table[token // 4]) * 4 + token % 4
        for (query, context), table in zip(lens, meta.block_tables, strict=True)
        for token in range(context - query, context)
    ]
    angles = [torch.rand(rows, SIZE // 2).mul(7).repeat(1, 2) for _ in range(2)]
    rotations = [(each.cos(), each.sin()) for each in angles]
    kv = [step.kv_layer.nan_to_num(0.5) for step in made]
    return torch.randn(rows, HIDDEN), rotations, kv, replace(meta, slots=torch.tensor(slots), cache={})


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_no_bit_differs_from_the_operations_one_by_one(
    isa: library.Isa, layout: Layout, lens: list[tuple[int, int]], threads: int
) -> None:
    torch.manual_seed(layout)
    layers = [layer(layout, isa, index) for index in range(3)]
    x, rotations, kv, meta = step_of(lens, 3)
    fused = fuse(layers, isa)
    assert fused is not None
    own = [pool.clone() for pool in kv]
    got = fused(x.clone(), rotations, own, meta)
    assert got is not None
    wanted = one_by_one(layers, x, rotations, kv, meta, isa)
    assert all(map(torch.equal, got, wanted))
    assert all(map(torch.equal, own, kv))
    assert all(each.isfinite().all() for each in got)


@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_no_bit_differs_over_pools_of_bfloat16(
    isa: library.Isa, lens: list[tuple[int, int]], threads: int
) -> None:
    torch.manual_seed(6)
    layers = [layer(Layout.BFLOAT16, isa, index) for index in range(3)]
    x, rotations, floats, meta = step_of(lens, 3)
    kv = [pool.bfloat16() for pool in floats]
    fused, own = fuse(layers, isa), [pool.clone() for pool in kv]
    assert fused is not None
    got = fused(x.clone(), rotations, own, meta)
    if not isa.rounds_rows:
        assert got is None
        return
    assert got is not None
    wanted = one_by_one(layers, x, rotations, kv, meta, isa)
    assert all(map(torch.equal, got, wanted))
    assert all(map(torch.equal, own, kv))
    assert fused(x, rotations, [own[0], *floats[1:]], meta) is None


@pytest.mark.parametrize("read", [(2, 0, 1, 70), (0, 1, 0, 0), (0, 0, 0, 0), (3, 1, 5, 130)], ids=str)
def test_rows_that_are_read_have_the_bits_of_a_step_that_reads_all(
    isa: library.Isa, read: tuple[int, ...], threads: int
) -> None:
    torch.manual_seed(7)
    fused = fuse([layer(Layout.INT8, isa, index) for index in range(2)], isa)
    assert fused is not None
    x, rotations, kv, meta = step_of([(3, 20), (1, 9), (5, 5), (130, 140)], 2)
    of_all, of_some = kv, [pool.clone() for pool in kv]
    wanted = fused(x.clone(), rotations, of_all, meta)
    got = fused(x.clone(), rotations, of_some, replace(meta, read_lens=read))
    assert wanted is not None
    assert got is not None
    ends = meta.query_starts[1:]
    rows = [row for end, count in zip(ends, read, strict=True) for row in range(end - count, end)]
    for some, every in zip(got, wanted, strict=True):
        assert torch.equal(some[rows], every[rows])
    assert all(map(torch.equal, of_some, of_all))
    assert all(each.isfinite().all() for each in got)


def test_8_bits_with_zero_points_and_layers_of_different_formats() -> None:
    torch.manual_seed(3)
    isa = library.fastest_exact()
    values, zeros = (
        torch.randint(-128, 128, (HIDDEN, INNER)).to(torch.int8),
        torch.randint(-9, 9, (HIDDEN, 66)),
    )
    down = in_panels(packed_int8(values, torch.rand(HIDDEN, 66) / 1000, zeros, 32, isa))
    layers = [layer(layout, isa, index) for index, layout in enumerate((Layout.STEPS4, Layout.FLOAT16))]
    layers[1] = replace(layers[1], mlp=replace(layers[1].mlp, down=down))
    fused = fuse(layers)
    assert fused is not None
    for lens in STEPS.values():
        x, rotations, kv, meta = step_of(lens, 2)
        got = fused(x.clone(), rotations, [pool.clone() for pool in kv], meta)
        assert got is not None
        assert all(map(torch.equal, got, one_by_one(layers, x, rotations, kv, meta, isa)))


def test_a_pool_that_moves_is_found_again() -> None:
    torch.manual_seed(4)
    layers = [layer(Layout.FLOAT32, library.fastest_exact(), 0)]
    fused = fuse(layers)
    assert fused is not None
    x, rotations, kv, meta = step_of(STEPS["two"], 1)
    for _ in range(3):
        moved = [pool.clone() for pool in kv]
        got = fused(x.clone(), rotations, moved, meta)
        assert got is not None
        assert all(
            map(torch.equal, got, one_by_one(layers, x, rotations, moved, meta, library.fastest_exact()))
        )


def test_other_steps_and_layers_are_left_alone() -> None:
    isa = library.fastest_exact()
    simple = layer(Layout.FLOAT32, isa, 0)
    fused = fuse([simple])
    assert fused is not None
    x, rotations, kv, meta = step_of([(1, 9)], 1)
    in_bytes = ScaledKV(kv[0].to(torch.int8), torch.ones(kv[0].shape[:-1]))
    assert fused(x, rotations, [in_bytes], meta) is None
    assert fused(x.double(), rotations, kv, meta) is None
    assert fused(x[:0], rotations, kv, meta) is None
    assert fused(x, rotations, kv, replace(meta, both_ways=(True,))) is None
    floats = replace(simple.mlp, down=torch.randn(HIDDEN, INNER))
    assert fuse([replace(simple, mlp=floats)]) is None
    assert fuse([]) is None


def test_what_pointers_cannot_know_is_checked() -> None:
    simple = layer(Layout.FLOAT32, library.fastest_exact(), 0)
    with pytest.raises(ValueError, match=r"not \(71,\) for \(72,\)"):
        fuse([replace(simple, mlp=replace(simple.mlp, norm=torch.rand(71)))])
    fused = fuse([simple])
    assert fused is not None
    x, rotations, kv, meta = step_of([(2, 9), (1, 5)], 1)
    beyond = replace(meta, slots=torch.tensor([0, 1, kv[0].shape[0] * 4]), cache={})
    wrong: list[tuple[Tensor, list[Rotation], list[Tensor], AttentionMeta]] = [
        (x[:2], rotations, kv, meta),
        (x[:, :70], rotations, kv, meta),
        (x, [(cos[:, :8], sin) for cos, sin in rotations], kv, meta),
        (x, [], kv, meta),
        (x, rotations, [], meta),
        (x, rotations, [kv[0][:, :, :1].contiguous()], meta),
        (x, rotations, [kv[0][:1]], meta),
        (x, rotations, kv, beyond),
        (x, rotations, kv, replace(meta, read_lens=(3, 1), cache={})),
        (x, rotations, kv, replace(meta, read_lens=(1,), cache={})),
    ]
    for given in wrong:
        with pytest.raises(ValueError, match="takes?"):
            fused(*given)

"""Native attention against its definition in float64 and against PyTorch's, on every instruction set of this processor."""

import random
from dataclasses import replace

import pytest
import torch

from kernels.cpu import library
from kernels.cpu.attention import attend, supports
from kernels.ops import KVLayer, ScaledKV
from kernels.rounding import rounded
from kernels.torch.paged_attention import PagedAttention
from tests.kernels.paged_step import Step, expected, make_step

pytestmark = pytest.mark.skipif(not library.instruction_sets(), reason="there are no native kernels here")
HEADS = {"grouped": (6, 2), "single": (1, 1), "equal": (3, 3), "one_kv_head": (14, 1)}
BOUND = {torch.float32: (4e-6, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


@pytest.fixture(params=list(library.Isa), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> library.Isa:
    if request.param not in library.instruction_sets():
        pytest.skip(f"this processor has no {request.param.name}")
    return request.param


def mixed(rng: random.Random) -> list[tuple[int, int]]:
    lens = [(1, rng.randint(1, 190)) for _ in range(3)]
    lens += [(query, query + rng.choice((0, 1, 13, 64, 150))) for query in (2, 5, 17)]
    rng.shuffle(lens)
    return lens


def in_bytes(step: Step, dtype: torch.dtype = torch.int8) -> tuple[ScaledKV, Step]:
    """The step's pool in 8 bits, and the step with the floats that it stands for."""
    flat, flat_scales = rounded(step.kv_layer.flatten(0, -2), dtype)
    data, scales = flat.view(step.kv_layer.shape), flat_scales.view(step.kv_layer.shape[:-1])
    meant = data.float() * scales[..., None]
    tokens = [
        meant[table].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : len(keys)]
        for table, keys in zip(step.meta.block_tables, step.keys, strict=True)
    ]
    return ScaledKV(data, scales), replace(
        step, keys=[kv[0] for kv in tokens], values=[kv[1] for kv in tokens]
    )


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert got.dtype == dtype
    atol, rtol = BOUND[dtype]
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize(("window", "soft_cap", "has_sinks"), [(0, 0.0, False), (1, 2.0, False), (70, 3.0, True)])  # fmt: skip
@pytest.mark.parametrize("heads", HEADS)
def test_any_mix_of_sequences(
    isa: library.Isa, heads: str, window: int, soft_cap: float, has_sinks: bool, dtype: torch.dtype
) -> None:
    rng = random.Random(f"{heads}{window}")
    step = make_step(
        mixed(rng), heads=HEADS[heads], head_dim=rng.choice((16, 48, 64, 96)), block_size=rng.choice((1, 4, 16)), dtype=dtype
    )  # fmt: skip
    sinks = torch.linspace(-3.0, 4.0, HEADS[heads][0]) if has_sinks else None
    got = attend(step.q, step.kv_layer, step.meta, 0.2, window, soft_cap, sinks, isa)
    close(got, expected(step, 0.2, window, soft_cap, sinks), dtype)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("window", [0, 1, 40, 1000])
def test_tokens_that_see_later_ones(isa: library.Isa, window: int, dtype: torch.dtype) -> None:
    """All of their context, but for what a window hides of what is before them."""
    lens = [(17, 17), (9, 40), (1, 30), (150, 190), (5, 60), (130, 130)]
    both_ways = (True, False, True, True, True, False)
    step = make_step(lens, heads=(6, 2), head_dim=32, block_size=16, dtype=dtype, both_ways=both_ways)
    got = attend(step.q, step.kv_layer, step.meta, 0.2, window, 0.0, None, isa)
    close(got, expected(step, 0.2, window, 0.0), dtype)


def test_tokens_that_see_later_ones_over_8_bits(isa: library.Isa) -> None:
    lens, both_ways = [(40, 40), (9, 70)], (True, False)
    step = make_step(lens, heads=(6, 2), head_dim=32, block_size=16, both_ways=both_ways)
    step.kv_layer.nan_to_num_()
    for dtype in (torch.int8, torch.float8_e4m3fn):
        pool, meant = in_bytes(step, dtype)
        got = attend(step.q, pool, step.meta, 0.2, 30, 0.0, None, isa)
        close(got, expected(meant, 0.2, 30, 0.0))


@pytest.mark.parametrize(("window", "size"), [(0, 64), (30, 32), (0, 48)])
def test_queries_of_float32_over_a_pool_of_bfloat16(isa: library.Isa, window: int, size: int) -> None:
    step = make_step(
        mixed(random.Random(5)), heads=(6, 2), head_dim=size, block_size=16, dtype=torch.bfloat16
    )
    step.q = torch.randn(step.q.shape)
    got = attend(step.q, step.kv_layer, step.meta, 0.1, window, 0.0, None, isa)
    rounds = isa.rounds_rows and size % 32 == 0
    atol, rtol = BOUND[torch.bfloat16 if rounds else torch.float32]
    torch.testing.assert_close(got.double(), expected(step, 0.1, window, 0.0), atol=atol, rtol=rtol)


@pytest.mark.parametrize("window", [0, 30])
def test_a_pool_of_8_bits_means_its_floats(isa: library.Isa, window: int) -> None:
    step = make_step(mixed(random.Random(1)), heads=(6, 2), head_dim=32, block_size=16)
    step.kv_layer.nan_to_num_()
    pool, meant = in_bytes(step)
    got = attend(step.q, pool, step.meta, 0.2, window, 0.0, None, isa)
    close(got, expected(meant, 0.2, window, 0.0))


def test_a_pool_of_float8_means_its_floats() -> None:
    step = make_step(mixed(random.Random(2)), heads=(6, 2), head_dim=32, block_size=16)
    step.kv_layer.nan_to_num_()
    pool, meant = in_bytes(step, torch.float8_e4m3fn)
    close(attend(step.q, pool, step.meta, 0.2, 0, 0.0, None), expected(meant, 0.2, 0, 0.0))


@pytest.mark.parametrize("size", [8, 40, 128, 256])
def test_sizes_of_heads_that_some_instruction_set_divides(size: int) -> None:
    step = make_step(mixed(random.Random(3)), heads=(4, 2), head_dim=size, block_size=8)
    assert supports(step.kv_layer)
    got = attend(step.q, step.kv_layer, step.meta, 0.1, 0, 0.0, None)
    close(got, expected(step, 0.1, 0, 0.0))
    torch.testing.assert_close(got, PagedAttention()(step.q, step.kv_layer, step.meta, 0.1, 0, 0.0, None), atol=4e-6, rtol=1e-5)  # fmt: skip


def test_scores_far_apart_and_far_from_zero(isa: library.Isa) -> None:
    step = make_step([(1, 200), (9, 120)], heads=(4, 2), head_dim=16)
    for scale in (30.0, -30.0, 1e-6):
        got = attend(step.q, step.kv_layer, step.meta, scale, 0, 0.0, None, isa)
        torch.testing.assert_close(got.double(), expected(step, scale, 0, 0.0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 64)])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (50, 2.0), (45, 0.0)])
def test_a_token_has_the_same_bits_however_it_is_batched_and_chunked(
    isa: library.Isa, window: int, soft_cap: float, dtype: torch.dtype, size: int
) -> None:
    whole = make_step([(150, 300), (1, 70)], heads=(6, 2), head_dim=size, block_size=16, dtype=dtype)
    whole.q = torch.randn(whole.q.shape)
    sinks = torch.linspace(-1.0, 1.0, 6)
    want = attend(whole.q, whole.kv_layer, whole.meta, 0.3, window, soft_cap, sinks, isa)
    for start, end in ((0, 1), (0, 13), (7, 8), (13, 150), (149, 150)):
        meta = replace(
            whole.meta,
            query_starts=(0, end - start),
            query_lens=(end - start,),
            context_lens=(150 + end,),
            block_tables=whole.meta.block_tables[:1],
            cache={},
        )
        got = attend(whole.q[start:end], whole.kv_layer, meta, 0.3, window, soft_cap, sinks, isa)
        assert torch.equal(got, want[start:end])


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 32)])
def test_a_neighbours_nan_stays_with_the_neighbour(isa: library.Isa, dtype: torch.dtype, size: int) -> None:
    step = make_step([(1, 10), (1, 11), (6, 12)], head_dim=size, dtype=dtype)
    clean = attend(step.q, step.kv_layer, step.meta, 0.5, 0, 0.0, None, isa)
    step.kv_layer[step.meta.block_tables[1], 0] = torch.nan
    got = attend(step.q, step.kv_layer, step.meta, 0.5, 0, 0.0, None, isa)
    assert got[1].isnan().all()
    others = [0, 2, 3, 4, 5, 6, 7]
    assert torch.equal(got[others], clean[others])


def test_what_pointers_cannot_know_is_checked() -> None:
    step = make_step([(3, 20)], head_dim=16)
    wrong: list[tuple[torch.Tensor, KVLayer, object]] = [
        (step.q, step.kv_layer.transpose(2, 3), step.meta),
        (step.q, step.kv_layer.half(), step.meta),
        (step.q[:2], step.kv_layer, step.meta),
        (step.q[:, :, :8], step.kv_layer, step.meta),
        (step.q, step.kv_layer[:1], replace(step.meta, cache={})),
        (step.q, step.kv_layer, replace(step.meta, context_lens=(50,), cache={})),
        (step.q, step.kv_layer, replace(step.meta, context_lens=(2,), cache={})),
        (step.q, step.kv_layer, replace(step.meta, block_tables=(), cache={})),
        (
            step.q,
            step.kv_layer,
            replace(step.meta, block_tables=(step.meta.block_tables[0].int(),), cache={}),
        ),
    ]
    for q, pool, meta in wrong:
        with pytest.raises(ValueError, match="native attention takes"):
            attend(q, pool, meta, 0.5, 0, 0.0, None)  # pyright: ignore[reportArgumentType]

"""KV of 8 bits: rounded as the hand-over rounds it, and attended to as what it means."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from core.kv import KVLayout
from device.convert import convert
from kernels.cpu.invariant_ops import invariant_ops
from kernels.ops import AttentionMeta, Ops, ScaledKV
from kernels.rounding import rounded
from kernels.torch.reference import reference_ops

DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}
CPU = torch.device("cpu")
BLOCK, HEADS, DIM = 4, 2, 8
LENS = [(1, 9), (5, 5), (3, 8), (1, 1)]
"""(query tokens, context tokens) of each sequence."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vector_is_rounded_as_if_it_were_handed_over(dtype: str) -> None:
    vectors = torch.randn(50, DIM) * torch.logspace(-4, 4, 50)[:, None]
    vectors[3] = 0.0
    source, target = (
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=DIM, block_size=4, dtype="float32"),
        KVLayout(num_layers=1, num_kv_heads=1, head_dim=DIM, block_size=4, dtype=dtype, scales="vector"),
    )
    data, scales = convert(source, vectors.numpy().view(np.uint8).reshape(-1), None, target)
    stored, own = rounded(vectors, DTYPES[dtype])
    assert scales is not None
    assert np.array_equal(own.numpy(), scales)
    assert np.array_equal(stored.view(torch.uint8).numpy().reshape(-1), data)


def step() -> tuple[AttentionMeta, int]:
    """Blocks in any order, with others between them; the second last sequence begins as the first one does."""
    tables = [np.array(ids, np.int64) for ids in ([7, 2, 9], [4, 1], [7, 3], [5, 6, 8])]
    slots: list[int] = []
    for (query, context), table in zip(LENS, tables, strict=True):
        slots += [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(context - query, context)]
    queries, contexts = zip(*LENS, strict=True)
    return AttentionMeta.build(queries, contexts, tables, np.array(slots, np.int64), CPU), 12


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("ops", [reference_ops(), invariant_ops()], ids=["reference", "invariant"])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_a_step_over_8_bits_is_one_over_what_they_mean(dtype: torch.dtype, ops: Ops, window: int) -> None:
    meta, num_blocks = step()
    shape = (num_blocks, 2, HEADS, BLOCK)
    before = torch.randn(*shape, DIM)
    stored, scales = rounded(before.flatten(0, 3), dtype)
    kv = ScaledKV(stored.view(*shape, DIM), scales.view(shape))
    unread = [0, 10, 11]
    kv.data.view(torch.uint8)[unread] = 255
    kv.scales[unread] = torch.nan
    total = sum(query for query, _ in LENS)
    qkv, ones = torch.randn(total, (3 + 2) * HEADS * DIM // 1), torch.ones(total, DIM)
    q = ops.rope_write_kv(qkv, ones, 0 * ones, None, kv, meta)
    floats = kv.data.float() * kv.scales[..., None]
    fresh = qkv.view(total, -1, DIM)[:, -2 * HEADS :].unflatten(1, (2, HEADS))
    for row, slot in enumerate(meta.slots.tolist()):
        got = floats[slot // BLOCK, :, :, slot % BLOCK]
        step_size = fresh[row].abs().amax(-1, keepdim=True) * (2**-4 if dtype != torch.int8 else 1 / 254)
        assert ((got - fresh[row]).abs() <= step_size * 1.001).all()
    got = ops.paged_attention(q, kv, meta, 0.3, window, 0.0, None)
    plain, _ = step()
    want = ops.paged_attention(q, floats, plain, 0.3, window, 0.0, None)
    torch.testing.assert_close(got, want)
    assert all(got[first:end].isfinite().all() for first, end in pairwise(meta.query_starts))

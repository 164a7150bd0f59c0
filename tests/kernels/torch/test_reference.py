"""The reference operations against their definitions, written out in float64."""

import math

import numpy as np
import pytest
import torch

from core.kv import KVLayout, KVShard
from kernels.ops import AttentionMeta, Ops
from kernels.select import select_ops
from kernels.torch.reference import write_kv

CPU = torch.device("cpu")


@pytest.fixture
def ops() -> Ops:
    return select_ops(CPU)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm(ops: Ops, dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(3, 2, 24, dtype=dtype), torch.randn(24)
    exact = x.double()
    want = exact / (exact.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    got = ops.rms_norm(x, weight, 1e-3)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_rope_turns_each_pair_by_its_angle(ops: Ops) -> None:
    x, angles = torch.randn(5, 3, 8), torch.randn(5, 4)
    doubled = torch.cat((angles, angles), -1)
    got = ops.rope(x, doubled.cos(), doubled.sin())
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 1, 4), angles[:, None])
    torch.testing.assert_close(got, torch.cat((pairs.real, pairs.imag), -1))


def test_gated_activations(ops: Ops) -> None:
    x = torch.randn(4, 14).double()
    gate, up = x[:, :7], x[:, 7:]
    torch.testing.assert_close(ops.silu_mul(x), gate / (1 + torch.exp(-gate)) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(ops.gelu_tanh_mul(x), 0.5 * gate * (1 + torch.tanh(inner)) * up)


def test_clamped_swiglu(ops: Ops) -> None:
    x = torch.linspace(-9.0, 9.0, 12).view(2, 6)
    got = ops.clamped_swiglu(x, 1.7, 3.0)
    for row in range(2):
        for i in range(3):
            gate, up = min(float(x[row, i]), 3.0), max(-3.0, min(3.0, float(x[row, 3 + i])))
            assert float(got[row, i]) == pytest.approx(
                gate / (1 + math.exp(-1.7 * gate)) * (up + 1), rel=1e-5
            )


def test_linear(ops: Ops) -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(ops.linear(x, weight, bias), (weight @ x.T).T + bias)
    torch.testing.assert_close(ops.linear(x, weight, None), (weight @ x.T).T)


def test_write_kv_puts_every_vector_where_core_kv_says() -> None:
    heads, head_dim, block_size, num_blocks = 3, 4, 2, 5
    shard = KVShard.whole(
        KVLayout(num_layers=2, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype="float32")
    )
    pool = torch.zeros(2, num_blocks, 2, heads, block_size, head_dim)
    table = np.array([4, 1, 3])
    slots = np.array([table[t // block_size] * block_size + t % block_size for t in range(1, 6)])
    k, v = torch.randn(5, heads, head_dim), torch.randn(5, heads, head_dim)
    write_kv(k, v, pool[1], AttentionMeta.build([5], [6], [table], slots, CPU))
    expected = torch.zeros(pool.numel())
    for row, token in enumerate(range(1, 6)):
        for is_value, source in enumerate((k, v)):
            for head in range(heads):
                block, slot = int(table[token // block_size]), token % block_size
                at = shard.offset(num_blocks, 1, block, is_value, head, slot) // 4
                expected[at : at + head_dim] = source[row, head]
    torch.testing.assert_close(pool.flatten(), expected, rtol=0, atol=0)

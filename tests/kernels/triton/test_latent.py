"""Latent attention in the latent space against the reference operation."""

import numpy as np
import pytest
import torch

from kernels.ops import AttentionMeta
from kernels.torch import reference
from kernels.triton.latent import absorbed_attention, invariant_latent_attention, latent_attention
from tests.kernels.indexed_steps import IndexedStep
from tests.kernels.latent_pools import KINDS, stored_pool


@pytest.mark.parametrize("lens", [[(1, 40), (2, 9), (1, 1)], [(1, 300)]], ids=["batch", "split"])
@pytest.mark.parametrize("heads", [3, 20, 70])
def test_latent_attention(device: torch.device, heads: int, lens: list[tuple[int, int]]) -> None:
    nope, rank, rotated, value, block_size = 16, 24, 8, 12, 4
    counts = [-(-context // block_size) for _, context in lens]
    order = np.random.default_rng(0).permutation(sum(counts) + 2).astype(np.int64)
    tables = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(lens))]
    num_tokens = sum(query for query, _ in lens)
    meta = AttentionMeta.build(
        [q for q, _ in lens], [c for _, c in lens], tables, np.zeros(num_tokens, np.int64), device
    )
    pool = torch.randn(len(order), 1, 1, block_size, rank + rotated, device=device)
    q = torch.randn(num_tokens, heads, nope + rotated, device=device)
    k_up, v_up = torch.randn(heads, nope, rank, device=device), torch.randn(heads, value, rank, device=device)
    want = reference.reference_ops().latent_attention(q, pool, meta, 0.1, k_up, v_up)
    got = latent_attention(q, pool, meta, 0.1, k_up, v_up)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_latents_of_8_bits(device: torch.device, kind: str) -> None:
    step = IndexedStep.draw([(1, 70), (3, 64), (9, 20)], latent=32, device=device)
    pool = stored_pool(step.pool, kind, (24, 32), 4)
    q = torch.randn(len(step.q), 20, 16 + 8, device=device)
    k_up, v_up = torch.randn(20, 16, 24, device=device), torch.randn(20, 12, 24, device=device)
    want = reference.reference_ops().latent_attention(q, pool.floats, step.meta, 0.1, k_up, v_up)
    got = latent_attention(q, pool.stored, step.meta, 0.1, k_up, v_up)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    got = invariant_latent_attention(q, pool.stored, step.meta, 0.1, k_up, v_up, 16)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [16, 128])
def test_latents_as_large_as_models_have_them(device: torch.device, heads: int, dtype: torch.dtype) -> None:
    """Which Hopper has a kernel of its own for."""
    lens, rank, rotated, block_size = [(1, 70), (3, 64), (1, 1), (9, 130)], 512, 64, 16
    tables = np.split(
        np.random.default_rng(0).permutation(5 + 4 + 1 + 9 + 2).astype(np.int64), (5, 9, 10, 19)
    )[:4]
    num_tokens = sum(query for query, _ in lens)
    meta = AttentionMeta.build(
        [q for q, _ in lens], [c for _, c in lens], tables, np.zeros(num_tokens, np.int64), device
    )
    pool = torch.randn(21, 1, 1, block_size, rank + rotated, device=device).to(dtype)
    q = torch.randn(num_tokens, heads, rank + rotated, device=device).to(dtype)
    got = absorbed_attention(q, pool, meta, 0.05, rank)
    first = 0
    for (query, context), table in zip(lens, tables, strict=True):
        latents = pool[torch.from_numpy(table).to(device)].reshape(-1, rank + rotated)[:context].double()
        scores = torch.einsum("thr,kr->thk", q[first : first + query].double(), latents) * 0.05
        at = torch.arange(context, device=device)
        hidden = at[None, None, :] > (context - query + torch.arange(query, device=device))[:, None, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        want = torch.einsum("thk,kr->thr", weights, latents[:, :rank])
        torch.testing.assert_close(got[first : first + query].double(), want, atol=2e-2, rtol=2e-2)
        first += query

"""Latent attention in the latent space against the reference operation."""

import numpy as np
import pytest
import torch

from kernels.ops import AttentionMeta
from kernels.torch import reference
from kernels.triton.latent import latent_attention


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

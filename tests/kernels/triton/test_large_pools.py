"""Pools with more elements than 32 bits count: what lies at their end is written and read as what lies at their beginning. Memory
that nobody touches is not taken, so a host has room for them as well."""

import numpy as np
import torch

from kernels.ops import AttentionMeta, ScaledKV
from kernels.triton.attention import TritonAttention
from kernels.triton.fixed_step import TritonFixedStep
from kernels.triton.latent import absorbed_attention
from kernels.triton.rope import rope_and_write_kv

BLOCK_SIZE, NUM_TOKENS = 16, 20
COUNTED = 1 << 31


def step_at(table: list[int], device: torch.device) -> tuple[AttentionMeta, AttentionMeta]:
    """Return a prompt whose KV lies in these blocks, and a decode step for graphs behind it."""
    slots = np.array([table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(NUM_TOKENS)])
    blocks = np.array(table)
    fixed = TritonFixedStep(1, 1, len(table), 0, BLOCK_SIZE, device)
    inputs = fixed.inputs([1], [NUM_TOKENS], [blocks], [int(slots[-1])])
    fixed.fill([torch.from_numpy(each).to(device) for each in inputs])
    return AttentionMeta.build([NUM_TOKENS], [NUM_TOKENS], [blocks], slots, device), fixed.meta


def test_keys_and_values(device: torch.device) -> None:
    kv_heads, size = 2, 64
    num_blocks = COUNTED // (2 * kv_heads * BLOCK_SIZE * size) + 2
    pool = ScaledKV(
        torch.empty(num_blocks, 2, kv_heads, BLOCK_SIZE, size, dtype=torch.int8, device=device),
        torch.empty(num_blocks, 2, kv_heads, BLOCK_SIZE, device=device),
    )
    qkv, angles = (
        torch.randn(NUM_TOKENS, 8 * size, device=device),
        torch.randn(NUM_TOKENS, size, device=device),
    )
    said: list[torch.Tensor] = []
    for table in ([0, 1], [num_blocks - 2, num_blocks - 1]):
        prompt, decode = step_at(table, device)
        q = rope_and_write_kv(qkv, angles, angles, prompt.slots, pool, 4)
        attend = TritonAttention()
        rows = attend(q, pool, prompt, 0.1, 0, 0.0)
        said.append(torch.cat((rows, attend(q[-1:].contiguous(), pool, decode, 0.1, 0, 0.0))))
    assert said[0].isfinite().all()
    assert torch.equal(*said)


def test_latents(device: torch.device) -> None:
    rank, size = 16, 24
    num_blocks = COUNTED // (BLOCK_SIZE * size) + 2
    pool = torch.empty(num_blocks, 1, 1, BLOCK_SIZE, size, dtype=torch.float16, device=device)
    latents = torch.randn(2, 1, 1, BLOCK_SIZE, size, device=device).half()
    q = torch.randn(NUM_TOKENS, 4, size, device=device).half()
    said: list[torch.Tensor] = []
    for table in ([0, 1], [num_blocks - 2, num_blocks - 1]):
        prompt, decode = step_at(table, device)
        for block, content in zip(table, latents, strict=True):
            pool[block] = content
        rows = absorbed_attention(q, pool, prompt, 0.1, rank)
        said.append(torch.cat((rows, absorbed_attention(q[-1:].contiguous(), pool, decode, 0.1, rank))))
    assert said[0].isfinite().all()
    assert torch.equal(*said)

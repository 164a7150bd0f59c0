"""Steps of paged attention, and their results by definition: for each query a softmax over what it may see, in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.ops import AttentionMeta

CPU = torch.device("cpu")


@dataclass(kw_only=True)
class Step:
    """Sequences of (query tokens, context tokens) with random Q, K and V in a pool that is NaN elsewhere."""

    q: torch.Tensor
    kv_layer: torch.Tensor
    meta: AttentionMeta
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_step(
    lens: list[tuple[int, int]], *, heads: tuple[int, int] = (4, 2), head_dim: int = 8, block_size: int = 4,
    dtype: torch.dtype = torch.float32, seed: int = 0, device: torch.device = CPU, both_ways: Sequence[bool] = (),
) -> Step:  # fmt: skip
    torch.manual_seed(seed)
    num_heads, num_kv_heads = heads
    counts = [-(-context // block_size) for _, context in lens]
    order = np.random.default_rng(seed).permutation(sum(counts) + 3).astype(np.int64)
    ends = np.cumsum(counts)
    tables = [order[end - count : end] for end, count in zip(ends, counts, strict=True)]
    kv_layer = torch.full((len(order), 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    keys = [torch.randn(context, num_kv_heads, head_dim, dtype=dtype) for _, context in lens]
    values = [torch.randn(context, num_kv_heads, head_dim, dtype=dtype) for _, context in lens]
    for table, k, v in zip(tables, keys, values, strict=True):
        for token in range(len(k)):
            kv_layer[table[token // block_size], 0, :, token % block_size] = k[token]
            kv_layer[table[token // block_size], 1, :, token % block_size] = v[token]
    meta = AttentionMeta.build(
        [query for query, _ in lens],
        [context for _, context in lens],
        tables,
        np.zeros(sum(query for query, _ in lens), np.int64),
        device,
    )
    q = torch.randn(sum(query for query, _ in lens), num_heads, head_dim, dtype=dtype)
    meta = replace(meta, both_ways=tuple(both_ways))
    return Step(q=q.to(device), kv_layer=kv_layer.to(device), meta=meta, keys=keys, values=values)


def expected(
    step: Step, scale: float, window: int, soft_cap: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """(T, H, D) float64 on the host."""
    out = []
    row = 0
    for seq, (query_len, k, v) in enumerate(zip(step.meta.query_lens, step.keys, step.values, strict=True)):
        repeats = step.q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(repeats, 1) for x in (k, v))
        for i in range(query_len):
            end = len(k) - query_len + i + 1
            first = max(0, end - window) if window else 0
            end = len(k) if step.meta.sees_all(seq) else end
            scores = torch.einsum("hd,lhd->hl", step.q[row].cpu().double(), k[first:end]) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.cpu().double()[:, None]), -1)
            weights = scores.softmax(-1)[:, : end - first]
            out.append(torch.einsum("hl,lhd->hd", weights, v[first:end]))
            row += 1
    return torch.stack(out)

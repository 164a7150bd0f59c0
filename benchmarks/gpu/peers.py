"""The same work by other people's kernels, where they are installed."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import AttentionMeta

try:
    import flashinfer
except ImportError:
    flashinfer = None


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Callable[[], object]:
    """q (B, H, L, D), k and v (B, Hkv, L', D), contiguous: torch chooses the backend."""
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def flashinfer_decode(
    q: Tensor, pool: Tensor, meta: AttentionMeta, scale: float
) -> Callable[[], object] | None:
    """Decode over the same paged pool: Baton's layout is FlashInfer's HND."""
    if flashinfer is None:
        return None
    block_size, device = pool.shape[3], q.device
    counts = torch.tensor([len(table) for table in meta.block_tables])
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int().to(device)
    last = torch.tensor(
        [(c - 1) % block_size + 1 for c in meta.context_lens], dtype=torch.int32, device=device
    )
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    wrapper.plan(
        indptr, torch.cat(meta.block_tables).int().to(device), last, q.shape[1], pool.shape[2], q.shape[2], block_size,
        q_data_type=q.dtype, kv_data_type=pool.dtype, sm_scale=scale,
    )  # fmt: skip
    return lambda: wrapper.run(q, pool)

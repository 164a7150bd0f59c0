"""Paged attention by FlashAttention 2, over Baton's pool as it is: its caches are (num_blocks, block_size, Hkv, D) by strides.

Written against flash-attn 2.8.3 (`flash_attn_varlen_func`, `flash_attn_with_kvcache`); its blocks are multiples of 256 tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernels.attention.case import Backend, Case, kind_of
from kernels.ops import AttentionMeta, KVLayer

_BLOCK_TOKENS = 256
_DTYPES = (torch.float16, torch.bfloat16)


def flash_attention_backend(library: Any) -> Backend:
    return Backend("flash_attention", FlashAttention(library), unable)


def unable(case: Case) -> str:
    if case.block_size % _BLOCK_TOKENS:
        return f"FlashAttention needs blocks of {_BLOCK_TOKENS} tokens, and engine.block_size is {case.block_size}"
    if case.dtype not in _DTYPES:
        return f"FlashAttention computes in float16 and bfloat16, not in {str(case.dtype).removeprefix('torch.')}"
    if case.head_dim > 256 or case.head_dim % 8:
        return f"FlashAttention has heads of up to 256 in eights, not of {case.head_dim}"
    return "FlashAttention's kernels know no sinks" if case.sinks else ""


@dataclass(frozen=True, slots=True)
class _Uploaded:
    """A step's metadata on the device, int32."""

    query_starts: Tensor
    context_starts: Tensor
    context_lens: Tensor
    block_table: Tensor
    """(B, the longest context's blocks). Behind a context's end it has block 0, which is not read."""

    @classmethod
    def of(cls, meta: AttentionMeta, device: torch.device) -> "_Uploaded":
        contexts = torch.tensor([0, *meta.context_lens], dtype=torch.int32)
        starts = torch.tensor(meta.query_starts, dtype=torch.int32)
        table = pad_sequence(list(meta.block_tables), batch_first=True).int()
        parts = (starts, contexts.cumsum(0, dtype=torch.int32), contexts[1:], table)
        return cls(*(part.to(device) for part in parts))


class FlashAttention:
    """`Ops.paged_attention`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __call__(
        self, q: Tensor, kv_layer: KVLayer, meta: AttentionMeta, scale: float, window: int, soft_cap: float,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        assert isinstance(kv_layer, Tensor), "8 bits are read by Triton's kernels"
        assert sinks is None, "a case with sinks is not FlashAttention's"
        if (uploaded := meta.cache.get("flash attention")) is None:
            uploaded = meta.cache["flash attention"] = _Uploaded.of(meta, q.device)
        keys, values = kv_layer.transpose(2, 3).unbind(1)
        options = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (window - 1, 0) if window else (-1, -1),
            "softcap": soft_cap,
            "block_table": uploaded.block_table,
        }
        if kind_of(meta) == "decode":
            lens = uploaded.context_lens
            return self._library.flash_attn_with_kvcache(
                q[:, None], keys, values, cache_seqlens=lens, **options
            )[:, 0]
        return self._library.flash_attn_varlen_func(
            q, keys, values, uploaded.query_starts, uploaded.context_starts,
            max(meta.query_lens), max(meta.context_lens), **options,
        )  # fmt: skip

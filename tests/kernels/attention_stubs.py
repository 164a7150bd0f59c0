"""Stand-ins for FlashInfer and FlashAttention with their published signatures, which compute by definition what the real ones do.

They read the pool only through what they are given, in the layouts that the real ones document, and insist on what those check."""

import torch
from torch import Tensor

PUBLISHED = {
    "flashinfer 0.7.2.post1 BatchDecodeWithPagedKVCacheWrapper.__init__": "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, "
    "use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, "
    "paged_kv_last_page_len_buffer=None, backend='auto', jit_args=None",
    # `plan` passes its keywords on to it.
    "flashinfer 0.7.2.post1 BatchDecodeWithPagedKVCacheWrapper._plan_impl": "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, "
    "head_dim, page_size, *, pos_encoding_mode='NONE', window_left=-1, window_right=0, logits_soft_cap=None, "
    "q_data_type='float16', kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, "
    "rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, "
    "disable_split_kv=False, q_len_per_req=1, is_causal=None",
    "flashinfer 0.7.2.post1 BatchPrefillWithPagedKVCacheWrapper.__init__": "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, "
    "qo_indptr_buf=None, paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, "
    "custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None, variant_owns_mask=False",
    "flashinfer 0.7.2.post1 BatchPrefillWithPagedKVCacheWrapper.plan": "self, qo_indptr, paged_kv_indptr, paged_kv_indices, "
    "paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, "
    "packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, "
    "window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, "
    "o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, "
    "max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, "
    "max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None",
    "flash_attn 2.8.3.post2 flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None",
    "flash_attn 2.8.3.post2 flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int, soft_cap: float) -> Tensor:
    """q (T, H, D), the last T tokens of k and v (L, Hkv, D); `left`, `right`: how far a token sees, -1 all."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeats, 1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.double(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(len(k))[None] - torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)


def int32(*tensors: Tensor) -> None:
    assert all(tensor.dtype == torch.int32 for tensor in tensors)


def read_pages(cache: Tensor, pages: list[int], length: int) -> tuple[Tensor, Tensor]:
    """HND pages (num_pages, 2, Hkv, page_size, D) -> K and V (length, Hkv, D)."""
    planes = cache[pages].permute(1, 0, 3, 2, 4).flatten(1, 2)
    return planes[0, :length], planes[1, :length]


class _Paged:
    """What both wrappers do with their plans."""

    plans = 0

    def _keep(
        self, indptr: Tensor, indices: Tensor, last: Tensor, heads: tuple[int, int, int, int],
        scale: float | None, left: int, right: int, soft_cap: float | None,
    ) -> None:  # fmt: skip
        int32(indptr, indices, last)
        assert indptr[0] == 0
        assert indptr[-1] == len(indices)
        assert scale is not None
        type(self).plans += 1
        self._pages = [indices[indptr[i] : indptr[i + 1]].tolist() for i in range(len(last))]
        self._lens = [
            (len(pages) - 1) * heads[3] + int(rest) for pages, rest in zip(self._pages, last, strict=True)
        ]
        assert all(1 <= rest <= heads[3] for rest in last.tolist())
        self._heads, self._how = heads, (scale, left, right, soft_cap or 0.0)

    def _run(self, q: Tensor, cache: Tensor, starts: list[int]) -> Tensor:
        num_heads, kv_heads, dim, page_size = self._heads
        assert cache.shape[1:] == (2, kv_heads, page_size, dim)
        assert q.shape == (starts[-1], num_heads, dim)
        out = [
            attend(q[starts[i] : starts[i + 1]], *read_pages(cache, pages, length), *self._how)
            for i, (pages, length) in enumerate(zip(self._pages, self._lens, strict=True))
        ]
        return torch.cat(out)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
        backend="auto", jit_args=None,
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def _plan_impl(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        pos_encoding_mode="NONE", window_left=-1, window_right=0, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
        non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False,
        q_len_per_req=1, is_causal=None,
    ):  # fmt: skip
        heads = num_qo_heads, num_kv_heads, head_dim, page_size
        self._dtype = q_data_type
        self._keep(indptr, indices, last_page_len, heads, sm_scale, window_left, -1, logits_soft_cap)

    def plan(self, *args, **kwargs):
        self._plan_impl(*args, **kwargs)

    def run(self, q, paged_kv_cache):
        assert q.dtype == self._dtype
        return self._run(q, paged_kv_cache, list(range(len(q) + 1)))


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
    ):  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None,
    ):  # fmt: skip
        int32(qo_indptr)
        self._starts, self._dtype = qo_indptr.tolist(), q_data_type
        heads = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        right = 0 if causal else -1
        self._keep(*pages, heads, sm_scale, window_left, right, logits_soft_cap)

    def run(self, q, paged_kv_cache):
        assert q.dtype == self._dtype
        return self._run(q, paged_kv_cache, self._starts)


def _read_cache(k: Tensor, v: Tensor, pages: list[int], length: int) -> tuple[Tensor, Tensor]:
    """(num_blocks, block_size, Hkv, D)"""
    assert k.stride(-1) == v.stride(-1) == 1
    return k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):  # fmt: skip
    int32(cu_seqlens_q, cu_seqlens_k, block_table)
    starts, lens = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == max(lens)
    left, right = window_size
    out = [
        attend(
            q[starts[i] : starts[i + 1]], *_read_cache(k, v, block_table[i][: -(-length // k.shape[1])].tolist(), length),
            softmax_scale, left, 0 if causal else right, softcap,
        )
        for i, length in enumerate(lens)
    ]  # fmt: skip
    return torch.cat(out)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    int32(cache_seqlens, block_table)
    left, right = window_size
    out = [
        attend(
            q[i], *_read_cache(k_cache, v_cache, block_table[i][: -(-length // k_cache.shape[1])].tolist(), length),
            softmax_scale, left, 0 if causal else right, softcap,
        )
        for i, length in enumerate(cache_seqlens.tolist())
    ]  # fmt: skip
    return torch.stack(out)

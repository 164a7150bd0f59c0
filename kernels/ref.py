"""Pure PyTorch of every operation: the specification, and what runs on a CPU.

Attention gathers a sequence's blocks into contiguous memory with one index per step. Sequences with one query token are
attended together, in groups of similar context; the others one by one."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import AttentionMeta, Ops

_SMALL_GROUP_BLOCKS = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None] + rotated * sin[:, None]


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gelu_tanh_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def write_kv(k: Tensor, v: Tensor, kv_layer: Tensor, meta: AttentionMeta) -> None:
    num_heads, block_size, head_dim = kv_layer.shape[2:]
    if (rows := meta.cache.get("write_rows")) is None:
        block, offset = meta.slots // block_size, meta.slots % block_size
        first = (block * 2 * num_heads * block_size + offset)[:, None]
        key_rows = first + torch.arange(num_heads, device=first.device) * block_size
        rows = meta.cache["write_rows"] = (key_rows.flatten(), (key_rows + num_heads * block_size).flatten())
    flat = kv_layer.view(-1, head_dim)
    flat.index_copy_(0, rows[0], k.reshape(-1, head_dim))
    flat.index_copy_(0, rows[1], v.reshape(-1, head_dim))


def paged_attention(
    q: Tensor, kv_layer: Tensor, meta: AttentionMeta, scale: float, window: int, soft_cap: float
) -> Tensor:
    if (groups := meta.cache.get("groups")) is None:
        groups = meta.cache["groups"] = _groups(meta, kv_layer)
    out = torch.empty_like(q)
    for group in groups:
        keys, values = _gather(kv_layer, group)
        mask = group.mask(window)
        if group.query_len == 1:
            out[group.rows] = _attend_single(q[group.rows], keys, values, mask, scale, soft_cap)
        else:
            rows = slice(group.first_row, group.first_row + group.query_len)
            out[rows] = _attend_many(q[rows], keys[0], values[0], mask, scale, soft_cap)
    return out


@dataclass(slots=True)
class _Group:
    """Sequences attended in one call: several with one query token each, or one with many."""

    rows: Tensor
    first_row: int
    query_len: int
    context_lens: Tensor
    key_rows: Tensor
    """(b * Hkv * n,) rows of the layer viewed as (num_blocks * 2 * Hkv, block_size * D)."""
    shape: tuple[int, int, int]
    """(b, Hkv, padded context in tokens)"""
    masks: dict[int, Tensor | None]

    def mask(self, window: int) -> Tensor | None:
        """True where attention is allowed, (b, 1, 1, L) or (query_len, L); None where everything is."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window)
        return self.masks[window]

    def _make_mask(self, window: int) -> Tensor | None:
        position = torch.arange(self.shape[2], device=self.context_lens.device)
        if self.query_len == 1:
            last = self.context_lens[:, None] - 1
        else:
            last = self.context_lens - self.query_len + torch.arange(self.query_len, device=position.device)
            last = last[:, None]
        allowed = position <= last
        if window:
            allowed &= position > last - window
        if self.query_len == 1:
            return None if self.shape[0] == 1 and bool(allowed.all()) else allowed[:, None, None]
        return allowed


def _groups(meta: AttentionMeta, kv_layer: Tensor) -> list[_Group]:
    buckets: dict[int, list[int]] = {}
    groups: list[_Group] = []
    for i, query_len in enumerate(meta.query_lens):
        if query_len == 1:
            size = max(_SMALL_GROUP_BLOCKS, len(meta.block_tables[i]))
            buckets.setdefault((size - 1).bit_length(), []).append(i)
        else:
            groups.append(_group(meta, kv_layer, [i]))
    return groups + [_group(meta, kv_layer, members) for members in buckets.values()]


def _group(meta: AttentionMeta, kv_layer: Tensor, members: list[int]) -> _Group:
    num_heads, block_size = kv_layer.shape[2:4]
    device = meta.slots.device
    lens = [-(-meta.context_lens[i] // block_size) for i in members]
    tables = torch.zeros(len(members), max(lens), dtype=torch.int64, device=device)
    for row, (i, length) in enumerate(zip(members, lens, strict=True)):
        tables[row, :length] = meta.block_tables[i][:length]
    heads = torch.arange(num_heads, device=device)[None, :, None]
    key_rows = tables[:, None, :] * (2 * num_heads) + heads
    return _Group(
        rows=torch.tensor([meta.query_starts[i] for i in members], device=device),
        first_row=meta.query_starts[members[0]],
        query_len=meta.query_lens[members[0]],
        context_lens=torch.tensor([meta.context_lens[i] for i in members], device=device),
        key_rows=key_rows.flatten(),
        shape=(len(members), num_heads, max(lens) * block_size),
        masks={},
    )


def _gather(kv_layer: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
    """K and V of the group's contexts, each (b, Hkv, L, D)."""
    num_blocks, _, num_heads, block_size, head_dim = kv_layer.shape
    flat = kv_layer.view(num_blocks * 2 * num_heads, block_size * head_dim)
    keys = flat.index_select(0, group.key_rows).view(*group.shape, head_dim)
    values = flat.index_select(0, group.key_rows + num_heads).view(*group.shape, head_dim)
    return keys, values


def _attend_single(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float
) -> Tensor:
    """(b, H, D) x (b, Hkv, L, D): the query heads of one KV head play the part of query tokens."""
    num_seqs, num_heads, head_dim = q.shape
    grouped = q.view(num_seqs, k.shape[1], num_heads // k.shape[1], head_dim)
    return _attend(grouped, k, v, mask, scale, soft_cap).reshape(num_seqs, num_heads, head_dim)


def _attend_many(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float
) -> Tensor:
    """(T, H, D) x (Hkv, L, D)."""
    num_tokens, num_heads, head_dim = q.shape
    repeats = num_heads // k.shape[0]
    queries = q.view(num_tokens, k.shape[0], repeats, head_dim).permute(1, 2, 0, 3)
    out = _attend(
        queries,
        k[:, None].expand(-1, repeats, -1, -1),
        v[:, None].expand(-1, repeats, -1, -1),
        mask,
        scale,
        soft_cap,
    )
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, soft_cap: float) -> Tensor:
    if not soft_cap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.tanh((q @ k.transpose(-1, -2)).float() * (scale / soft_cap)) * soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1).to(v.dtype) @ v


REFERENCE = Ops(rms_norm, rope, silu_mul, gelu_tanh_mul, F.linear, write_kv, paged_attention)

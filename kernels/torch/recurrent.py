"""Layers with a recurrent state: a short convolution, and a scan over each sequence's tokens, in float32.

A step with one token of a sequence is one update of its state. Longer pieces are computed in chunks (Yang et al., 2024, "Gated
Delta Networks"): products within a chunk, and one update of the state behind it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import AttentionMeta, Convolution, StateLayer
from kernels.states import StateShape

_CHUNK_TOKENS = 64
_EPS = 1e-6


def gated_delta(
    x: Tensor, decay: Tensor, beta: Tensor, kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer
) -> Tensor:
    """`Ops.gated_delta`"""
    shape, held = layer.shape, read_states(kv_layer, meta, layer)
    mixed, inputs = convolve(x.float(), layer.conv, held[:, : shape.conv_floats], meta)
    q, k, v = heads_of(mixed, shape)
    q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + _EPS) for part in (q, k))
    matrices = held[:, shape.conv_floats :].unflatten(1, (-1, shape.key_dim, shape.value_dim))
    out, matrices = _scanned(meta, matrices, q * shape.key_dim**-0.5, k, v, decay, beta)
    write_states(kv_layer, meta, layer, torch.cat((inputs, matrices.flatten(1)), 1))
    return out.to(x.dtype)


def heads_of(mixed: Tensor, shape: StateShape) -> tuple[Tensor, Tensor, Tensor]:
    """(T, channels) -> the first vector (T, value heads, key_dim) of each key head, its second one, both for all of its value
    heads, and the value heads' own (T, value heads, value_dim)."""
    first, second, v = mixed.split((shape.key_size, shape.key_size, shape.value_size), 1)
    times = shape.num_value_heads // shape.num_key_heads
    q, k = (part.unflatten(1, (-1, shape.key_dim)).repeat_interleave(times, 1) for part in (first, second))
    return q, k, v.unflatten(1, (-1, shape.value_dim))


def read_states(kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer) -> Tensor:
    """(B, num_floats) float32; zeros for the sequences that begin."""
    assert meta.states is not None
    blocks, offsets = _slots(kv_layer, meta, layer)
    stored = kv_layer.permute(0, 3, 1, 2, 4)[blocks, offsets]
    held = stored.flatten(1).view(torch.float32)[:, : layer.shape.num_floats]
    return torch.where(meta.states.begins[:, None], 0.0, held)


def write_states(kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer, held: Tensor) -> None:
    """`held`: (B, num_floats) float32"""
    blocks, offsets = _slots(kv_layer, meta, layer)
    slot = kv_layer[0, :, :, 0]
    num_floats = layer.place.num_slots * slot.nbytes // held.element_size()
    filled = F.pad(held, (0, num_floats - held.shape[1])).view(kv_layer.dtype)
    kv_layer.permute(0, 3, 1, 2, 4)[blocks, offsets] = filled.view(*offsets.shape, *slot.shape)


def _slots(kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer) -> tuple[Tensor, Tensor]:
    """Return block and offset of each slot of each sequence's state, (B, num_slots) each."""
    assert meta.states is not None
    if (found := meta.cache.get(layer.place)) is None:
        blocks, size = meta.states.blocks, kv_layer.shape[3]
        first = layer.place.first_slot
        slots = torch.arange(first, first + layer.place.num_slots, device=blocks.device)
        found = blocks[:, slots // size], (slots % size).expand(len(blocks), -1)
        meta.cache[layer.place] = found
    return found


def convolve(x: Tensor, conv: Convolution, held: Tensor, meta: AttentionMeta) -> tuple[Tensor, Tensor]:
    """(x (T, channels), conv, last inputs (B, channels * (kernel - 1)), meta) -> silu of what each channel's filter makes of it
    (T, channels), and the last inputs behind the step, as `held` has them."""
    before = conv.weight.shape[1] - 1
    current, first, last = _rows(meta, before, x.device)
    padded = x.new_empty(len(x) + before * len(held), x.shape[1])
    padded[current + before] = x
    padded[first] = held.unflatten(1, (-1, before)).mT.flatten(0, 1)
    out = padded[current] * conv.weight[:, 0]
    for tap in range(1, before + 1):
        out = torch.addcmul(out, padded[current + tap], conv.weight[:, tap])
    inputs = padded[last].unflatten(0, (-1, before)).mT.flatten(1)
    return F.silu(out if conv.bias is None else out + conv.bias), inputs


def _rows(meta: AttentionMeta, before: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of a tensor in which `before` rows stand before each sequence's: the first that each token's filter sees (T,),
    and those before each sequence's rows and its last ones (B * before,)."""
    if (found := meta.cache.get("conv_rows")) is None:
        lens = torch.tensor(meta.query_lens)
        count = torch.arange(len(lens))
        current = torch.arange(int(lens.sum())) + before * torch.repeat_interleave(count, lens)
        begins = lens.cumsum(0) - lens + before * count
        taps = torch.arange(before)
        first, last = ((rows[:, None] + taps).flatten() for rows in (begins, begins + lens))
        found = meta.cache["conv_rows"] = current.to(device), first.to(device), last.to(device)
    return found


def _scanned(
    meta: AttentionMeta, matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Scan each sequence's rows, (T, H, ..) each, from its matrix (B, H, key_dim, value_dim) on. Returns the rows' results and
    the matrices behind them."""
    lens, starts = meta.query_lens, meta.query_starts
    if max(lens) == 1:
        return _updated(matrices, q, k, v, decay, beta)
    out, behind = torch.empty_like(v), torch.empty_like(matrices)
    single = [index for index, length in enumerate(lens) if length == 1]
    if single:
        rows = [starts[index] for index in single]
        out[rows], behind[single] = _updated(
            matrices[single], q[rows], k[rows], v[rows], decay[rows], beta[rows]
        )
    for index, length in enumerate(lens):
        if length > 1:
            rows = slice(starts[index], starts[index + 1])
            by_head = (part[rows].transpose(0, 1) for part in (q, k, v, decay, beta))
            found, behind[index] = _in_chunks(matrices[index], *by_head)
            out[rows] = found.transpose(0, 1)
    return out, behind


def _updated(
    matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence."""
    matrices = matrices * decay.exp()[..., None, None]
    v = (v - (k[..., None, :] @ matrices)[..., 0, :]) * beta[..., None]
    matrices = torch.addcmul(matrices, k[..., None], v[..., None, :])
    return (q[..., None, :] @ matrices)[..., 0, :], matrices


def _in_chunks(
    matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence: matrix (H, key_dim, value_dim), vectors (H, T, ..), decay and beta (H, T)."""
    num_tokens = q.shape[1]
    size = min(num_tokens, _CHUNK_TOKENS)
    surplus = -num_tokens % size
    q, k, v = (F.pad(part, (0, 0, 0, surplus)).unflatten(1, (-1, size)) for part in (q, k, v))
    total = F.pad(decay, (0, surplus)).unflatten(1, (-1, size)).cumsum(2)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    seen = total.exp()[..., None]
    betas = F.pad(beta, (0, surplus)).unflatten(1, (-1, size))[..., None]
    # What each token's update owes to those before it in its chunk is a triangular system.
    system = (k * betas) @ k.mT * between
    v, read = (
        torch.linalg.solve_triangular(system, part, upper=False, unitriangular=True)
        for part in (v * betas, k * betas * seen)
    )
    within, ask = q @ k.mT * between, q * seen
    keep = k * (total[..., -1:] - total).exp()[..., None]
    out = torch.empty_like(v)
    for chunk in range(v.shape[1]):
        added = v[:, chunk] - read[:, chunk] @ matrix
        out[:, chunk] = ask[:, chunk] @ matrix + within[:, chunk] @ added
        matrix = matrix * seen[:, chunk, -1:] + keep[:, chunk].mT @ added
    return out.flatten(1, 2)[:, :num_tokens], matrix

"""The gated delta rule (Yang et al., 2024, "Gated Delta Networks"), in float32.

In chunks it is products within a chunk, and one update of the state behind it. A state decays as a whole, or each of its
channels by itself (Kimi Team, 2025, "Kimi Linear")."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import AttentionMeta
from kernels.state_layer import StateLayer
from kernels.states import StateShape
from kernels.torch.recurrent import CHUNK_TOKENS, Held, convolve, over_states, scanned

_EPS = 1e-6
_CHANNELS_CHUNK = 16
"""Tokens of a chunk where each channel decays by itself: each pair of tokens then has a vector of decays."""


def gated_delta(
    x: Tensor, decay: Tensor, beta: Tensor, kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer
) -> Tensor:
    """`Ops.gated_delta`."""
    return over_states(partial(_scan, layer), (x, decay, beta), kv_layer, meta, layer)


def _scan(layer: StateLayer, rows: Sequence[Tensor], held: Held, meta: AttentionMeta) -> tuple[Tensor, Held]:
    """`kernels.torch.recurrent.Scan` of inputs, decays and betas."""
    (x, decay, beta), (inputs, matrices), shape = rows, held, layer.shape
    mixed, inputs = convolve(x.float(), layer.conv, inputs, meta)
    q, k, v = heads_of(mixed, shape)
    q, k = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + _EPS) for part in (q, k))
    parts = (q * shape.key_dim**-0.5, k, v, decay, beta)
    in_chunks = _in_chunks if decay.dim() == beta.dim() else _by_channels
    out, matrices = scanned(meta, matrices, parts, _updated, in_chunks)
    return out.to(x.dtype), (inputs, matrices)


def heads_of(mixed: Tensor, shape: StateShape) -> tuple[Tensor, Tensor, Tensor]:
    """(T, channels) -> the first vector (T, value heads, key_dim) of each key head, its second one, both for all of its value
    heads, and the value heads' own (T, value heads, value_dim)."""
    first, second, v = mixed.split((shape.key_size, shape.key_size, shape.value_size), 1)
    times = shape.num_value_heads // shape.num_key_heads
    q, k = (part.unflatten(1, (-1, shape.key_dim)).repeat_interleave(times, 1) for part in (first, second))
    return q, k, v.unflatten(1, (-1, shape.value_dim))


def _updated(
    matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Take one token of each of B sequences: matrices (B, H, key_dim, value_dim), vectors (B, H, ..), decay (B, H) or (B, H,
    key_dim), beta (B, H). Return what is read (B, H, value_dim), and the matrices behind it."""
    matrices = matrices * decay.exp().view(*beta.shape, -1, 1)
    v = (v - (k[..., None, :] @ matrices)[..., 0, :]) * beta[..., None]
    matrices = torch.addcmul(matrices, k[..., None], v[..., None, :])
    return (q[..., None, :] @ matrices)[..., 0, :], matrices


def _in_chunks(
    matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Take T tokens of one sequence: matrix (H, key_dim, value_dim), vectors (T, H, ..), decay and beta (T, H). Return what is
    read (T, H, value_dim), and the matrix behind them."""
    q, k, v, decay, beta = (part.transpose(0, 1) for part in (q, k, v, decay, beta))
    num_tokens = q.shape[1]
    size = min(num_tokens, CHUNK_TOKENS)
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
    return out.flatten(1, 2)[:, :num_tokens].transpose(0, 1), matrix


def _by_channels(
    matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """`_in_chunks` with a decay (T, H, key_dim). No exponent is positive, however much a channel decays."""
    out = torch.empty_like(v)
    parts = [part.transpose(0, 1) for part in (q, k, v, decay, beta[..., None])]
    for first in range(0, len(v), _CHANNELS_CHUNK):
        rows = slice(first, first + _CHANNELS_CHUNK)
        q, k, v, decay, beta = (part[:, rows] for part in parts)
        total = decay.cumsum(1)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)[..., None]
        keys = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp() * k[:, None]
        system, within = (keys @ torch.stack((k * beta, q), -1)).unbind(-1)
        seen = total.exp()
        owed = (v - (k * seen) @ matrix) * beta
        added = torch.linalg.solve_triangular(system, owed, upper=False, unitriangular=True)
        out[rows] = ((q * seen) @ matrix + within @ added).transpose(0, 1)
        keep = k * (total[:, -1:] - total).exp()
        matrix = matrix * seen[:, -1, :, None] + keep.mT @ added
    return out, matrix

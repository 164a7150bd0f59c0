"""The selective state space of Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs"), in float32.

In chunks it is attention within a chunk, by weights that decay, and one update of the state behind it. G: groups of heads that
share queries and keys. R: heads of a group. Queries are what the paper calls C, keys B."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import AttentionMeta
from kernels.state_layer import StateLayer
from kernels.torch.recurrent import CHUNK_TOKENS, Held, convolve, over_states, scanned


def state_space(
    x: Tensor,
    steps: Tensor,
    decay: Tensor,
    skip: Tensor,
    kv_layer: Tensor,
    meta: AttentionMeta,
    layer: StateLayer,
) -> Tensor:
    """`Ops.state_space`."""
    return over_states(partial(_scan, layer, skip), (x, steps, decay), kv_layer, meta, layer)


def _scan(
    layer: StateLayer, skip: Tensor, rows: Sequence[Tensor], held: Held, meta: AttentionMeta
) -> tuple[Tensor, Held]:
    """`kernels.torch.recurrent.Scan` of inputs, steps and decays."""
    (x, steps, decay), (inputs, matrices), shape = rows, held, layer.shape
    mixed, inputs = convolve(x.float(), layer.conv, inputs, meta)
    v, k, q = mixed.split((shape.value_size, shape.key_size, shape.key_size), 1)
    groups = shape.num_key_heads
    q, k = (part.unflatten(1, (groups, shape.key_dim)) for part in (q, k))
    v = v.unflatten(1, (groups, -1, shape.value_dim))
    steps, decay = (part.unflatten(1, (groups, -1)) for part in (steps, decay))
    parts = (q, k, v * steps[..., None], decay)
    out, matrices = scanned(meta, matrices.unflatten(1, (groups, -1)), parts, _updated, _in_chunks)
    out = torch.addcmul(out, v, skip.view(groups, -1, 1))
    return out.flatten(1, 2).to(x.dtype), (inputs, matrices.flatten(1, 2))


def _updated(matrices: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence: matrices (B, G, R, key_dim, value_dim), q and k (B, G, key_dim), v (B, G, R, value_dim), decay
    (B, G, R)."""
    matrices = matrices * decay.exp()[..., None, None]
    matrices = torch.addcmul(matrices, k[:, :, None, :, None], v[..., None, :])
    return (q[:, :, None, None, :] @ matrices)[..., 0, :], matrices


def _in_chunks(matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: the same with T in place of B, but for its one matrix (G, R, key_dim, value_dim)."""
    num_tokens = len(v)
    size = min(num_tokens, CHUNK_TOKENS)
    surplus = -num_tokens % size

    def chunked(part: Tensor) -> Tensor:
        """(T, G, .. , N) -> (G, .., chunks, size, N)."""
        padded = F.pad(part.movedim(0, -2), (0, 0, 0, surplus))
        return padded.unflatten(-2, (-1, size))

    q, k, v, total = chunked(q), chunked(k), chunked(v), chunked(decay[..., None])[..., 0].cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    out = between.mul_((q @ k.mT)[:, None]) @ v
    seen, kept = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    for chunk in range(v.shape[2]):
        out[:, :, chunk] += q[:, None, chunk] @ matrix * seen[:, :, chunk]
        added = k[:, None, chunk].mT @ (v[:, :, chunk] * kept[:, :, chunk])
        matrix = matrix * seen[:, :, chunk, -1:] + added
    return out.flatten(2, 3)[:, :, :num_tokens].movedim(2, 0), matrix

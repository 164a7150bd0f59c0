"""The norms of queries and of keys over all heads at once, of which a rank may have some. Their weights are in the order in which
heads are rotated (`models.layers.rope.rotation_order`), as the rows are that they multiply."""

import torch
from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import Ops
from models.formats.weight_source import WeightSource
from models.layers.rope import rotation_order
from models.spec.model_spec import ModelSpec


class ProjectionNorms:
    """The RMSNorm of a token's queries, and that of its keys. Ranks add up the squares of the heads that they have."""

    def __init__(
        self, spec: ModelSpec, checkpoint: WeightSource, prefix: str, ops: Ops, collectives: Collectives
    ) -> None:
        self._ops, self._sum, self._eps = ops, collectives.sum_partial, spec.norm_eps
        counts = {"q": spec.num_heads, "k": spec.num_kv_heads}
        held = {name: checkpoint.held(f"{prefix}{name}_proj.weight", count) for name, count in counts.items()}
        self._is_whole = len(held["q"]) == spec.num_heads
        order = rotation_order(spec)
        order = slice(None) if order is None else order
        self._q_weight, self._k_weight = (
            checkpoint.take(f"{prefix}{name}_norm.weight", (count * spec.head_dim,), torch.float32)
            .unflatten(0, (count, spec.head_dim))[held[name]][:, order]
            .flatten()
            for name, count in counts.items()
        )
        # Ranks that share a KV head have some of its queries each: by so much its squares count on each of them.
        share = len(held["q"]) * spec.num_kv_heads / (len(held["k"]) * spec.num_heads)
        self._q_part, self._k_part = (
            part / (count * spec.head_dim) for part, count in zip((1.0, share), counts.values(), strict=True)
        )

    def __call__(self, qkv: Tensor) -> Tensor:
        """(T, (H + 2 Hkv) D) -> the same, queries and keys normalised."""
        ops, sizes = self._ops, (len(self._q_weight), len(self._k_weight))
        q, k, v = qkv.split((*sizes, sizes[1]), -1)
        if self._is_whole:
            normed = [ops.rms_norm(x, w, self._eps) for x, w in ((q, self._q_weight), (k, self._k_weight))]
            return torch.cat((*normed, v), -1)
        squares = (
            ops.by_rows(_sum_of_squares, x.float()) * part
            for x, part in ((q, self._q_part), (k, self._k_part))
        )
        scales = ops.by_rows(torch.rsqrt, self._sum(torch.cat((*squares,), -1)) + self._eps)
        q = (q.float() * scales[:, :1] * self._q_weight).to(qkv.dtype)
        k = (k.float() * scales[:, 1:] * self._k_weight).to(qkv.dtype)
        return torch.cat((q, k, v), -1)


def _sum_of_squares(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)

"""A layer with a gated delta rule in place of attention (Yang et al., 2024), as Qwen3-Next and Qwen3.5 have it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.collectives import Collectives
from kernels.ops import KVLayer, Ops
from kernels.packed import LinearWeight, joined
from kernels.rounding import Activations, Rounding
from kernels.state_layer import Convolution, StateLayer
from kernels.states import StatePlace
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.spec.model_spec import ModelSpec


class GatedDeltaNet:
    """`models.layers.attention.AttentionLayer` that keeps a state in place of keys and values, of as many heads as this rank
    has weights for."""

    takes: Rounding | None = None

    def __init__(
        self,
        spec: ModelSpec,
        place: StatePlace,
        checkpoint: WeightSource,
        prefix: str,
        ops: Ops,
        collectives: Collectives,
    ) -> None:
        kept = spec.recurrent
        assert kept is not None
        shape = kept.shape
        self._ops, self._sum, self._eps = ops, collectives.sum_partial, spec.norm_eps
        hidden, heads = spec.hidden_size, shape.num_value_heads

        def matrix(columns: int, **rows: int) -> LinearWeight:
            parts = [
                checkpoint.matrix(f"{prefix}{name}.weight", (size, columns)) for name, size in rows.items()
            ]
            return ops.pack(joined(parts, checkpoint.dtype), checkpoint.dtype)

        channels, values = shape.conv_channels, shape.value_size
        if kept.by_kind:
            self._qkvz = matrix(hidden, in_proj_qkv=channels, in_proj_z=values)
            self._ba = matrix(hidden, in_proj_b=heads, in_proj_a=heads)
        else:
            self._qkvz = matrix(hidden, in_proj_qkvz=channels + values)
            self._ba = matrix(hidden, in_proj_ba=2 * heads)
        self._out = matrix(values, out_proj=hidden)
        filters = (shape.conv_channels, 1, shape.conv_kernel)
        conv = checkpoint.take(f"{prefix}conv1d.weight", filters, torch.float32)[:, 0].contiguous()
        self._rate = -checkpoint.take(f"{prefix}A_log", (heads,), torch.float32).exp()
        self._shape = kept.held(len(self._rate))
        self._groups = 1 if kept.by_kind else self._shape.num_key_heads
        """Within each the rows of `_qkvz` and of `_ba` are in the order of what they make."""
        convolution = Convolution(conv, None)
        self._state = StateLayer(self._shape, place, convolution, kept.part, ("key", "key", "value"))
        self._dt_bias = checkpoint.take(f"{prefix}dt_bias", (heads,), torch.float32)
        self._norm = checkpoint.take(f"{prefix}norm.weight", (shape.value_dim,), torch.float32)

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        assert isinstance(kv_layer, Tensor), "states are kept as they are"
        ops = self._ops
        qkv, z = self._by_kind(ops.linear(x, self._qkvz, None))
        b, a = ops.linear(x, self._ba, None).float().unflatten(1, (self._groups, 2, -1)).unbind(2)
        decay = self._rate * F.softplus(a.flatten(1) + self._dt_bias)
        out = ops.gated_delta(qkv, decay, torch.sigmoid(b.flatten(1)), kv_layer, step.meta, self._state)
        normed = ops.rms_norm(out, self._norm, self._eps).float() * F.silu(z.float())
        return self._sum(ops.linear(normed.flatten(1).to(qkv.dtype), self._out, None))

    def _by_kind(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(T, all that each group has) -> queries, keys and values (T, channels), and gates (T, value heads, value_dim)."""
        shape, groups = self._shape, self._groups
        keys, values = shape.key_size // groups, shape.value_size // groups
        *parts, z = rows.unflatten(1, (groups, -1)).split((keys, keys, values, values), 2)
        return torch.cat([part.flatten(1) for part in parts], 1), z.reshape(len(rows), -1, shape.value_dim)

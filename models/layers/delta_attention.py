"""A layer with a gated delta rule in which each channel decays by itself (Kimi Team, 2025, "Kimi Linear")."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import KVLayer, Ops
from kernels.packed import LinearWeight, joined
from kernels.rounding import Activations, Rounding
from kernels.state_layer import Convolution, StateLayer
from kernels.states import StatePlace
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.spec.model_spec import ModelSpec


class DeltaAttention:
    """`models.layers.attention.AttentionLayer` that keeps a state in place of latents. Like these it is whole on every rank."""

    takes: Rounding | None = None

    def __init__(
        self, spec: ModelSpec, place: StatePlace, checkpoint: WeightSource, prefix: str, ops: Ops
    ) -> None:
        kept, dtype = spec.recurrent, checkpoint.dtype
        assert kept is not None
        self._ops, self._eps, self._shape = ops, spec.norm_eps, kept.shape
        hidden, heads, dim, inner = (
            spec.hidden_size, kept.shape.num_value_heads, kept.shape.value_dim, kept.shape.value_size
        )  # fmt: skip

        def matrix(columns: int, **rows: int) -> LinearWeight:
            parts = [
                checkpoint.matrix(f"{prefix}{name}.weight", (size, columns)) for name, size in rows.items()
            ]
            return ops.pack(joined(parts, dtype), dtype)

        def vector(name: str, *shape: int) -> Tensor:
            return checkpoint.take(f"{prefix}{name}", shape, torch.float32)

        self._qkv = matrix(hidden, q_proj=inner, k_proj=inner, v_proj=inner)
        self._low = matrix(hidden, f_a_proj=dim, g_a_proj=dim, b_proj=heads)
        self._forget, self._gate = matrix(dim, f_b_proj=inner), matrix(dim, g_b_proj=inner)
        self._out = matrix(inner, o_proj=hidden)
        filters = [vector(f"{name}_conv1d.weight", inner, 1, kept.shape.conv_kernel) for name in "qkv"]
        convolution = Convolution(torch.cat(filters)[:, 0].contiguous(), None)
        self._state = StateLayer(kept.shape, place, convolution, kept.part, ("key", "key", "value"))
        self._rate, self._bias = (
            -vector("A_log", 1, 1, heads, 1).exp().view(heads, 1),
            vector("dt_bias", inner),
        )
        self._norm = vector("o_norm.weight", dim)

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        assert isinstance(kv_layer, Tensor), "states are kept as they are"
        ops, shape = self._ops, self._shape
        heads, dim = shape.num_value_heads, shape.value_dim
        qkv = ops.linear(x, self._qkv, None)
        forget, gate, beta = ops.linear(x, self._low, None).split((dim, dim, heads), 1)
        steps = F.softplus(ops.linear(forget.contiguous(), self._forget, None).float() + self._bias)
        decay = self._rate * steps.unflatten(1, (heads, dim))
        out = ops.gated_delta(qkv, decay, torch.sigmoid(beta.float()), kv_layer, step.meta, self._state)
        gate = torch.sigmoid(ops.linear(gate.contiguous(), self._gate, None).float())
        normed = ops.rms_norm(out, self._norm, self._eps).float().flatten(1) * gate
        return ops.linear(normed.to(qkv.dtype), self._out, None)

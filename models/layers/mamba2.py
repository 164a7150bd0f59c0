"""A layer with a selective state space in place of attention (Mamba-2; Dao and Gu, 2024), as Granite 4 has it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.collectives import Collectives
from kernels.ops import KVLayer, Ops
from kernels.packed import LinearWeight
from kernels.rounding import Activations, Rounding
from kernels.state_layer import Convolution, StateLayer
from kernels.states import StatePlace
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.spec.model_spec import ModelSpec


class StateSpace:
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
        shape, has_bias = kept.shape, kept.projection_bias
        self._ops, self._sum, self._eps = ops, collectives.sum_partial, spec.norm_eps
        hidden, heads, inner = spec.hidden_size, shape.num_value_heads, shape.value_size
        sizes = (inner, shape.conv_channels, heads)

        def product(name: str, rows: int, columns: int) -> tuple[LinearWeight, Tensor | None]:
            weight = ops.pack(checkpoint.matrix(f"{prefix}{name}.weight", (rows, columns)), checkpoint.dtype)
            return weight, checkpoint.take(f"{prefix}{name}.bias", (rows,)) if has_bias else None

        def vector(name: str, size: int) -> Tensor:
            return checkpoint.take(f"{prefix}{name}", (size,), torch.float32)

        self._in, self._in_bias = product("in_proj", sum(sizes), hidden)
        self._out, self._out_bias = product("out_proj", hidden, inner)
        filters = (shape.conv_channels, 1, shape.conv_kernel)
        conv = checkpoint.take(f"{prefix}conv1d.weight", filters, torch.float32)[:, 0].contiguous()
        bias = vector("conv1d.bias", shape.conv_channels) if kept.conv_bias else None
        self._rate, self._skip = -vector("A_log", heads).exp(), vector("D", heads)
        self._step_bias, self._norm = vector("dt_bias", heads), vector("norm.weight", inner)
        self._shape = own = kept.held(len(self._rate))
        convolution = Convolution(conv, bias)
        self._state = StateLayer(own, place, convolution, kept.part, ("value", "key", "key"))
        self._sizes = own.value_size, own.conv_channels, own.num_value_heads
        self._group_size = inner // shape.num_key_heads
        """The values that are normalised together; a rank may have some of them."""
        self._ones = torch.ones_like(self._norm[: self._group_size])

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        assert isinstance(kv_layer, Tensor), "states are kept as they are"
        ops = self._ops
        gate, inputs, steps = ops.linear(x, self._in, self._in_bias).split(self._sizes, 1)
        steps = F.softplus(steps.float() + self._step_bias)
        out = ops.state_space(inputs, steps, self._rate * steps, self._skip, kv_layer, step.meta, self._state)
        gated = (out.flatten(1).float() * F.silu(gate.float())).unflatten(1, (self._shape.num_key_heads, -1))
        normed = self._normed(gated).flatten(1) * self._norm
        out = self._sum(ops.linear(normed.to(inputs.dtype), self._out, None))
        return out if self._out_bias is None else out + self._out_bias

    def _normed(self, gated: Tensor) -> Tensor:
        if gated.shape[2] == self._group_size:
            return self._ops.rms_norm(gated, self._ones, self._eps)
        squares = self._sum(gated.square().sum(2))
        return gated * torch.rsqrt(squares / self._group_size + self._eps)[..., None]

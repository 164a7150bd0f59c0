"""A layer with a short convolution between two gates in place of attention, as LFM2 has it."""

import torch
from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import KVLayer, Ops
from kernels.packed import LinearWeight
from kernels.rounding import Activations, Rounding
from kernels.state_layer import Convolution, StateLayer
from kernels.states import StatePlace
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.spec.model_spec import ModelSpec


class GatedConvolution:
    """`models.layers.attention.AttentionLayer` that keeps a convolution's last inputs in place of keys and values, of as many
    channels as this rank has weights for."""

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
        kept, size = spec.recurrent, spec.hidden_size
        assert kept is not None
        self._ops, self._sum = ops, collectives.sum_partial

        def product(name: str, rows: int) -> tuple[LinearWeight, Tensor | None]:
            weight = ops.pack(checkpoint.matrix(f"{prefix}{name}.weight", (rows, size)), checkpoint.dtype)
            return weight, checkpoint.take(f"{prefix}{name}.bias", (rows,)) if kept.projection_bias else None

        self._in, self._in_bias = product("in_proj", 3 * size)
        self._out, self._out_bias = product("out_proj", size)
        filters = checkpoint.take(f"{prefix}conv.weight", (size, 1, kept.shape.conv_kernel), torch.float32)
        bias = checkpoint.take(f"{prefix}conv.bias", (size,), torch.float32) if kept.conv_bias else None
        own = kept.held(len(filters) // kept.shape.value_dim)
        convolution = Convolution(filters[:, 0].contiguous(), bias)
        self._state = StateLayer(own, place, convolution, kept.part, ("value",))

    def __call__(self, x: Activations, kv_layer: KVLayer, step: ForwardStep) -> Tensor:
        assert isinstance(kv_layer, Tensor), "states are kept as they are"
        ops = self._ops
        before, behind, inputs = ops.linear(x, self._in, self._in_bias).chunk(3, 1)
        mixed = ops.short_convolution(before * inputs, kv_layer, step.meta, self._state)
        out = self._sum(ops.linear(behind * mixed, self._out, None))
        return out if self._out_bias is None else out + self._out_bias

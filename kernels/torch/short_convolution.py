"""A short convolution over each channel's last inputs, which are all that is kept of a sequence, in float32."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kernels.ops import AttentionMeta
from kernels.state_layer import StateLayer
from kernels.torch.recurrent import Held, filtered, over_states


def short_convolution(x: Tensor, kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer) -> Tensor:
    """`Ops.short_convolution`."""
    return over_states(partial(_scan, layer), (x,), kv_layer, meta, layer)


def _scan(layer: StateLayer, rows: Sequence[Tensor], held: Held, meta: AttentionMeta) -> tuple[Tensor, Held]:
    """`kernels.torch.recurrent.Scan` of inputs."""
    (x,), (inputs, matrices) = rows, held
    out, inputs = filtered(x.float(), layer.conv, inputs, meta)
    return out.to(x.dtype), (inputs, matrices)

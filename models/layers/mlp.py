"""The feed-forward block that every token passes, with a gate or without."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.collectives import ONE_RANK, Collectives
from kernels.ops import Gate, GatedBlock, MlpPart, Ops, Rows
from kernels.packed import Weight, joined
from kernels.rounding import Activations
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.lora.low_rank import Linear, LowRank
from models.spec.model_spec import ModelSpec

_NO_ROWS: Mapping[str, Rows] = {}


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def activation_of(spec: ModelSpec, ops: Ops) -> Callable[[Tensor], Tensor]:
    """(T, 2N), gates and then ups, or (T, N), ups alone -> (T, N)."""
    match spec.activation:
        case "silu":
            return ops.silu_mul
        case "gelu_tanh":
            return ops.gelu_tanh_mul
        case "clamped_swiglu":
            alpha, limit = spec.swiglu
            return lambda x: ops.clamped_swiglu(x, alpha, limit)
        case "relu2":
            return lambda x: ops.by_rows(squared_relu, x)
        case "limited_silu":
            return partial(_limited_silu, spec.swiglu[1])


def _limited_silu(limit: float, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def activation_for(spec: ModelSpec, ops: Ops, weight: Weight) -> Callable[[Tensor], Activations]:
    """Return the activation in the form that the product with `weight` behind it takes."""
    how, gate = ops.rounds(weight), gate_of(spec)
    if how is None or gate is None:
        return activation_of(spec, ops)
    return lambda x: ops.gated_rounded(x, gate, how)


def gate_of(spec: ModelSpec) -> Gate | None:
    """Return the activation as `Ops` know it; None for one that is not computed with others."""
    match spec.activation:
        case "silu" | "gelu_tanh" as gate:
            return gate
        case "clamped_swiglu" | "limited_silu" | "relu2":
            return None


class Mlp:
    """An MLP with `spec.projections` under `prefix`. `inner` is their full inner size."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: WeightSource,
        prefix: str,
        inner: int,
        ops: Ops,
        collectives: Collectives,
    ) -> None:
        hidden, bias = spec.hidden_size, spec.mlp_bias
        self._sum = collectives.sum_partial
        self._gate: Gate | None = gate_of(spec)
        *names, last = (f"{prefix}{name}" for name in spec.projections)
        rows = spec.num_ups * inner // len(names)
        gate_up = [checkpoint.matrix(f"{name}.weight", (rows, hidden)) for name in names]
        ups, self._gate_up_bias = joined(gate_up, checkpoint.dtype), None
        down = checkpoint.matrix(f"{last}.weight", (hidden, inner))
        self.takes, activate = ops.rounds(ups), activation_for(spec, ops, down)
        self._gate_up, self._down = ops.pack(ups, checkpoint.dtype), ops.pack(down, checkpoint.dtype)
        beside, self._down_bias = checkpoint.adapters.beside, None
        if bias:
            self._gate_up_bias = torch.cat([checkpoint.take(f"{name}.bias", (rows,)) for name in names])
            self._down_bias = checkpoint.take(f"{last}.bias", (hidden,))
        block = GatedBlock(
            gate_up=self._gate_up, gate_up_bias=self._gate_up_bias, gate=self._gate, down=self._down
        )
        # No method of this: what refers to itself is freed by a search for garbage alone, and holds its weights until then.
        self._in_order = _InOrder(
            block=block,
            linear=ops.linear,
            activate=activate,
            gate_up_adapters=beside(dict.fromkeys(names, (rows, hidden))),
            down_adapters=beside({last: (hidden, inner)}),
        )
        self._computed = ops.feed_forward(block, self._in_order)

    def __call__(self, x: Activations, step: ForwardStep) -> Tensor:
        """(T, hidden) -> (T, hidden), normalised before and not yet added to the residual."""
        adapters = step.meta.adapters
        out = self._sum(self._in_order(x, adapters) if adapters else self._computed(x))
        return out if self._down_bias is None else out + self._down_bias

    def part(self, norm: Tensor, norm_behind: Tensor | None) -> MlpPart | None:
        """Return the layer's half as data, with the norms before and behind it. None where ranks share it, or where its gate is
        another one."""
        if self._gate is None or self._sum is not ONE_RANK.sum_partial:
            return None
        return MlpPart(
            norm=norm,
            gate_up=self._gate_up,
            gate_up_bias=self._gate_up_bias,
            gate=self._gate,
            down=self._down,
            down_bias=self._down_bias,
            norm_behind=norm_behind,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _InOrder:
    """Computes one operation after the other, with what `adapters` add to both products for their rows."""

    block: GatedBlock
    linear: Linear
    activate: Callable[[Tensor], Activations]
    gate_up_adapters: LowRank
    down_adapters: LowRank

    def __call__(self, x: Activations, adapters: Mapping[str, Rows] = _NO_ROWS) -> Tensor:
        block = self.block
        gate_up = self.linear(x, block.gate_up, block.gate_up_bias)
        self.gate_up_adapters.add(gate_up, x, adapters, self.linear)
        inner = self.activate(gate_up)
        out = self.linear(inner, block.down, None)
        self.down_adapters.add(out, inner, adapters, self.linear)
        return out

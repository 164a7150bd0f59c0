"""Inputs that each layer of a model has of a token, beside the residual (Gemma 4 E2B and E4B): a row of a table, by the token,
and a projection of the token's embedding, added up."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import Ops
from models.formats.weight_source import WeightSource
from models.layers.mlp import activation_of
from models.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scales:
    table: float
    projection: float


class LayerInputs:
    """(tokens (T,), their embeddings (T, hidden)) -> (T, layers, size)."""

    def __init__(self, spec: ModelSpec, checkpoint: WeightSource, ops: Ops, collectives: Collectives) -> None:
        inputs = spec.layer_inputs
        assert inputs is not None
        self._ops, self._collectives, self._dtype = ops, collectives, checkpoint.dtype
        self._shape, self._eps = (spec.num_layers, inputs.size), spec.norm_eps
        width, hidden = spec.num_layers * inputs.size, spec.hidden_size
        table = checkpoint.table("model.embed_tokens_per_layer.weight", (inputs.vocab_size, width))
        self._rows = ops.look_up(table, checkpoint.dtype, None)
        projection = checkpoint.matrix("model.per_layer_model_projection.weight", (width, hidden))
        self._projection = ops.pack(projection, checkpoint.dtype)
        name = "model.per_layer_projection_norm.weight"
        self._norm = checkpoint.take(name, (inputs.size,), torch.float32)
        self._scales = _Scales(table=inputs.size**0.5, projection=hidden**-0.5)

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        rows = self._collectives.embed(tokens, self._rows, self._dtype)
        rows = rows * torch.tensor(self._scales.table, dtype=rows.dtype)
        projected = self._ops.linear(x, self._projection, None) * self._scales.projection
        normed = self._ops.rms_norm(projected.unflatten(1, self._shape), self._norm, self._eps)
        return (normed + rows.unflatten(1, self._shape)) * 2.0**-0.5


class LayerInput:
    """`models.layers.scaled_layer.AddInput`."""

    def __init__(self, spec: ModelSpec, index: int, checkpoint: WeightSource, ops: Ops) -> None:
        assert spec.layer_inputs is not None
        self._ops, self._eps, self._gated = ops, spec.norm_eps, activation_of(spec, ops)
        prefix, size, hidden = f"model.layers.{index}.", spec.layer_inputs.size, spec.hidden_size

        def matrix(name: str, shape: tuple[int, int]):
            return ops.pack(checkpoint.matrix(f"{prefix}{name}.weight", shape), checkpoint.dtype)

        self._gate = matrix("per_layer_input_gate", (size, hidden))
        self._out = matrix("per_layer_projection", (hidden, size))
        name = f"{prefix}post_per_layer_input_norm.weight"
        self._norm = checkpoint.take(name, (hidden,), torch.float32)

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        gate = self._ops.linear(x, self._gate, None)
        inner = self._gated(torch.cat((gate, inputs), 1))
        return self._ops.rms_norm(self._ops.linear(inner, self._out, None), self._norm, self._eps)

"""A layer of which the residual itself is changed behind both halves (Gemma 4): an input of the layer's own is added to it, and
it is multiplied by a number of the layer."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.ops import DenseLayer, ExpertWeights, KVLayer
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.layer import Layer
from models.spec.model_spec import ModelSpec

AddInput = Callable[[Tensor, Tensor], Tensor]
"""(x (T, hidden), this layer's inputs (T, size)) -> (T, hidden), to be added to x."""


@dataclass(frozen=True, slots=True)
class EndedLayer:
    layer: Layer
    index: int
    scalar: Tensor
    """(1,)"""
    add_input: AddInput | None = None

    @property
    def experts(self) -> ExpertWeights | None:
        return self.layer.experts

    def __call__(
        self, x: Tensor, added: Tensor | None, kv_layer: KVLayer, step: ForwardStep
    ) -> tuple[Tensor, Tensor | None]:
        """`Layer.__call__`, with nothing left to add."""
        x, added = self.layer(x, added, kv_layer, step)
        x = x + added
        if self.add_input is not None:
            assert step.inputs is not None, "the first stage makes the layers' inputs"
            x = x + self.add_input(x, step.inputs[:, self.index])
        return x * self.scalar, None

    def described(self, rotation: int) -> DenseLayer | None:
        """Return None: what is here is more than two halves."""
        del rotation


def scalar_of(spec: ModelSpec, checkpoint: WeightSource, index: int) -> Tensor | None:
    """Return the number by which what leaves a layer is multiplied; None where there is none."""
    return checkpoint.take(f"model.layers.{index}.layer_scalar", (1,)) if spec.layer_scalars else None

"""What follows a text's pooled hidden state, in float32: dense layers as sentence-transformers' files say, or a scorer's head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.errors import UnsupportedModel
from models.formats.tensor_files import read_tensors
from models.pooling.readout_layers import LayerSpec, TokenLogits, dense_layers
from models.pooling.scoring import score_layers

Layer = Callable[[Tensor], Tensor]
_ACTIVATIONS: Final[dict[str, Layer]] = {
    "Tanh": torch.tanh,
    "Identity": nn.Identity(),
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: Tensor
    """(M, N)"""
    bias: Tensor | None
    activation: Layer

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


class Readout:
    def __init__(self, layers: Sequence[Layer] = ()) -> None:
        self._layers = layers

    def __call__(self, pooled: Tensor) -> Tensor:
        """(N, hidden_size) float32 -> (N, size of the vectors)."""
        for layer in self._layers:
            pooled = layer(pooled)
        return pooled


NO_READOUT: Final = Readout()


def load_readout(folder: Path, device: torch.device) -> Readout:
    """Raises ConfigError and UnsupportedModel."""
    if layers := score_layers(folder):
        return Readout([_score_layer(folder, layer, device) for layer in layers])
    return Readout(
        [_load(spec.folder, LayerSpec("linear", spec.activation), device) for spec in dense_layers(folder)]
    )


def _score_layer(folder: Path, layer: LayerSpec | TokenLogits, device: torch.device) -> Layer:
    if isinstance(layer, LayerSpec):
        return _load(folder, layer, device)
    heads = "lm_head.weight", "model.embed_tokens.weight"
    tensors = read_tensors(folder, heads)
    head = next((tensors[name] for name in heads if name in tensors), None)
    if head is None:
        raise UnsupportedModel(f"the checkpoint in {folder} lacks the tensor {heads[0]!r}")
    row = head[layer.yes].float() - (0.0 if layer.no is None else head[layer.no].float())
    return _Dense(row[None].to(device), None, nn.Identity())


def _load(folder: Path, layer: LayerSpec, device: torch.device) -> Layer:
    names = [f"{name}.{part}" for name in (layer.name, layer.norm) if name for part in ("weight", "bias")]
    tensors = {name: tensor.float().to(device) for name, tensor in read_tensors(folder, names).items()}
    if f"{layer.name}.weight" not in tensors:
        raise UnsupportedModel(f"the checkpoint in {folder} lacks the tensor '{layer.name}.weight'")
    dense = _Dense(
        tensors[f"{layer.name}.weight"], tensors.get(f"{layer.name}.bias"), _ACTIVATIONS[layer.activation]
    )
    if not layer.norm:
        return dense
    weight, bias = tensors[f"{layer.norm}.weight"], tensors.get(f"{layer.norm}.bias")
    return lambda x: F.layer_norm(dense(x), weight.shape, weight, bias)

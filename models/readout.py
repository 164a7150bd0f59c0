"""What follows a text's pooled hidden state: dense layers in float32, as sentence-transformers' files say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from core.errors import ConfigError, UnsupportedModel
from models.pooling import modules_of
from models.spec import read_json

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "Tanh": torch.tanh,
    "Identity": nn.Identity(),
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class DenseSpec:
    folder: Path
    num_out: int
    activation: str


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: Tensor
    """(M, N)"""
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


class Readout:
    def __init__(self, layers: Sequence[Callable[[Tensor], Tensor]] = ()) -> None:
        self._layers = layers

    def __call__(self, pooled: Tensor) -> Tensor:
        """(N, hidden_size) float32 -> (N, size of the vectors)"""
        for layer in self._layers:
            pooled = layer(pooled)
        return pooled


NO_READOUT: Final = Readout()


def dense_layers(folder: Path) -> list[DenseSpec]:
    """Those of the checkpoint, without touching a weight. Raises ConfigError and UnsupportedModel."""
    return [_dense_spec(folder / path) for path, kind in modules_of(folder) if kind == "Dense"]


def load_readout(folder: Path, device: torch.device) -> Readout:
    """Raises ConfigError and UnsupportedModel."""
    return Readout([_load(spec, device) for spec in dense_layers(folder)])


def _dense_spec(folder: Path) -> DenseSpec:
    config = read_json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{folder} has the activation {activation!r}; {', '.join(_ACTIVATIONS)} are supported"
        )
    for name in ("module_input_name", "module_output_name"):
        if config.get(name, "sentence_embedding") not in (None, "sentence_embedding"):
            raise UnsupportedModel(
                f"{folder} has {name} {config[name]!r}; a dense layer behind the pooling is supported"
            )
    num_out = config.get("out_features")
    if not isinstance(num_out, int):
        raise UnsupportedModel(
            f"{folder / 'config.json'} says out_features {num_out!r}, where a number is needed"
        )
    return DenseSpec(folder, num_out, activation)


def _load(spec: DenseSpec, device: torch.device) -> _Dense:
    path = spec.folder / "model.safetensors"
    try:
        tensors = load_file(path)
        weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    except (SafetensorError, OSError, KeyError) as error:
        raise ConfigError(f"cannot read {path}: {error} (dense layers are read from safetensors)") from None
    return _Dense(
        weight.float().to(device),
        None if bias is None else bias.float().to(device),
        _ACTIVATIONS[spec.activation],
    )

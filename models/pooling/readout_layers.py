"""Descriptions of the layers behind a text's pooled hidden state, without a weight."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from core.errors import UnsupportedModel
from models.pooling.pooling import modules_of
from models.spec.model_spec import read_json

ACTIVATIONS: Final = ("Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid")
"""The activations of dense layers, by the names of PyTorch's classes."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A dense layer of the tensors `name`.weight and, where the checkpoint has it, `name`.bias."""

    name: str
    activation: str = "Identity"
    """PyTorch's class."""
    norm: str = ""
    """The name of the LayerNorm behind the activation; empty: there is none."""


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """By how much one token's logit is above another's; `no` None: the one's logit."""

    yes: int
    no: int | None


@dataclass(frozen=True, slots=True)
class DenseSpec:
    folder: Path
    num_out: int
    activation: str


def dense_layers(folder: Path) -> list[DenseSpec]:
    """Return the dense layers of the checkpoint, without touching a weight. Raises ConfigError and UnsupportedModel."""
    return [_dense_spec(folder / path) for path, kind in modules_of(folder) if kind == "Dense"]


def _dense_spec(folder: Path) -> DenseSpec:
    config = read_json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"{folder} has the activation {activation!r}; {', '.join(ACTIVATIONS)} are supported"
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

"""What operations of recurrent layers are over, beside their inputs."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kernels.states import StatePlace, StateShape


@dataclass(frozen=True, slots=True)
class Convolution:
    """One filter for each channel, over the channel's last inputs."""

    weight: Tensor
    """(channels, kernel) float32, the current input's factor last"""
    bias: Tensor | None
    """(channels,) float32"""


@dataclass(frozen=True, slots=True)
class StateLayer:
    """What the operation of one layer is over, beside its inputs."""

    shape: StateShape
    """What is here of the layer."""
    place: StatePlace
    conv: Convolution
    part: StateShape
    """One part of the state; as many are here as make `shape`."""
    channels: tuple[Literal["key", "value"], ...]
    """What the convolution's channels are of, in their order."""

"""Descriptions of the layers behind a text's pooled hidden state, without a weight."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A dense layer of the tensors `name`.weight and, where the checkpoint has it, `name`.bias."""

    name: str
    activation: str = "Identity"
    """PyTorch's class."""
    norm: str = ""
    """Of the LayerNorm behind the activation; empty: there is none."""


@dataclass(frozen=True, slots=True)
class TokenLogits:
    """By how much one token's logit is above another's; `no` None: the one's logit."""

    yes: int
    no: int | None

"""The two halves of a layer: what mixes tokens, and the feed-forward block."""

from typing import Protocol

from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import ExpertWeights, Ops
from kernels.rounding import Activations, Rounding
from models.formats.weight_source import WeightSource
from models.layers.attention import Attention, AttentionLayer, ForwardStep
from models.layers.delta_attention import DeltaAttention
from models.layers.dense_and_experts import DenseAndExperts
from models.layers.gated_attention import GatedAttention
from models.layers.gated_convolution import GatedConvolution
from models.layers.gated_delta_net import GatedDeltaNet
from models.layers.latent_attention import LatentAttention
from models.layers.mamba2 import StateSpace
from models.layers.mlp import Mlp
from models.layers.moe import Moe
from models.layers.per_layer_attention import SizedAttention
from models.spec.kv_places import slot_bytes
from models.spec.model_spec import ModelSpec


class FeedForward(Protocol):
    takes: Rounding | None
    """What its input is rounded to; None where it is not, or not for all that take it."""

    def __call__(self, x: Activations, step: ForwardStep) -> Tensor:
        """(T, hidden) -> (T, hidden), normalised before, as `takes` says, and not yet added to the residual."""
        ...


def mixer(
    spec: ModelSpec,
    index: int,
    checkpoint: WeightSource,
    prefix: str,
    ops: Ops,
    collectives: Collectives,
) -> AttentionLayer:
    """Return the layer's token mixer: attention, a gated delta rule, Mamba-2 or a short convolution."""
    if spec.recurrent is not None:
        place = spec.recurrent.places(slot_bytes(spec, checkpoint.dtype))[index]
        if place is not None:
            match spec.recurrent.kinds[index]:
                case "state_space":
                    return StateSpace(spec, place, checkpoint, f"{prefix}mamba.", ops, collectives)
                case "short_convolution":
                    return GatedConvolution(spec, place, checkpoint, f"{prefix}conv.", ops, collectives)
                case "channel_delta":
                    return DeltaAttention(spec, place, checkpoint, f"{prefix}delta_attn.", ops)
                case _:
                    return GatedDeltaNet(spec, place, checkpoint, f"{prefix}linear_attn.", ops, collectives)
    if spec.kv is not None:
        return SizedAttention(spec, index, checkpoint, f"{prefix}self_attn.", ops, collectives)
    attention = (
        LatentAttention if spec.mla is not None else GatedAttention if spec.attention_gate else Attention
    )
    return attention(spec, index, checkpoint, f"{prefix}self_attn.", ops, collectives)


def feed_forward(
    spec: ModelSpec,
    index: int,
    checkpoint: WeightSource,
    prefix: str,
    *,
    load: Tensor,
    ops: Ops,
    collectives: Collectives,
) -> tuple[FeedForward, ExpertWeights | None]:
    """Return the layer's feed-forward block and its experts, if it has any. `load`: see `models.layers.layer.Layer`."""
    if spec.moe is not None and spec.moe.sparse[index]:
        kind = DenseAndExperts if spec.moe.beside_dense else Moe
        moe = kind(spec, index, checkpoint, prefix, load=load, ops=ops, collectives=collectives)
        return moe, moe.held
    return Mlp(spec, checkpoint, f"{prefix}{spec.mlp_name}.", spec.mlp_size(index), ops, collectives), None

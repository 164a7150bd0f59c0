"""One layer: attention and a feed-forward block, each behind a norm and added to the residual."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.joins import Joins
from kernels.ops import ExpertWeights, Ops
from models.attention import Attention, AttentionLayer, Step
from models.latent_attention import LatentAttention
from models.mlp import Mlp, activation_of
from models.moe import Moe
from models.spec import ModelSpec
from models.weights import Checkpoint


class Layer:
    def __init__(
        self, spec: ModelSpec, index: int, checkpoint: Checkpoint, load: Tensor, ops: Ops, joins: Joins
    ) -> None:
        """`load` ((num_experts,) int64) counts the choices of this layer's router."""
        prefix = f"model.layers.{index}."
        self._norm, self._eps = ops.rms_norm, spec.norm_eps
        attention = Attention if spec.mla is None else LatentAttention
        self._attention: AttentionLayer = attention(
            spec, index, checkpoint, f"{prefix}self_attn.", ops, joins
        )
        self._mlp: Callable[[Tensor], Tensor]
        self.experts: ExpertWeights | None = None
        """None where every token passes the same weights."""
        if spec.moe is not None and spec.moe.sparse[index]:
            old = f"{prefix}block_sparse_moe."
            block = old if f"{old}gate.weight" in checkpoint else f"{prefix}mlp."
            moe = self._mlp = Moe(spec, index, checkpoint, block, load, ops, joins)
            self.experts = moe.held
        else:
            sizes = (spec.hidden_size, spec.intermediate_size)
            activate = activation_of(spec, ops)
            self._mlp = Mlp(checkpoint, f"{prefix}mlp.", sizes, spec.mlp_bias, activate, ops, joins)

        def norm(name: str) -> Tensor:
            return read_norm(spec, checkpoint, f"{prefix}{name}.weight")

        self._before_attention = norm("input_layernorm")
        self._before_mlp = norm(
            "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
        )
        self._after_attention = norm("post_attention_layernorm") if spec.post_norms else None
        self._after_mlp = norm("post_feedforward_layernorm") if spec.post_norms else None

    def __call__(self, x: Tensor, kv_layer: Tensor, step: Step) -> Tensor:
        """(T, hidden) -> (T, hidden)"""
        if len(x):  # without rows a rank only computes other ranks' on its experts
            out = self._attention(self._norm(x, self._before_attention, self._eps), kv_layer, step)
            x = x + (
                out if self._after_attention is None else self._norm(out, self._after_attention, self._eps)
            )
        out = self._mlp(self._norm(x, self._before_mlp, self._eps))
        return x + (out if self._after_mlp is None else self._norm(out, self._after_mlp, self._eps))


def read_norm(spec: ModelSpec, checkpoint: Checkpoint, name: str) -> Tensor:
    """(hidden_size,) float32: what a normalised vector is multiplied by."""
    weight = checkpoint.take(name, (spec.hidden_size,), torch.float32)
    return weight + 1.0 if spec.unit_offset_norm else weight

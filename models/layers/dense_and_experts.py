"""The feed-forward block in which every token passes a dense block and, beside it, some of many experts (Gemma 4 26B-A4B). Each
of the two has norms of its own before and behind it, and the router has another one."""

import torch
from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import Ops
from kernels.rounding import Activations, Rounding
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.expert_weights import read_experts
from models.layers.mlp import Mlp, activation_of
from models.layers.moe import count_choices
from models.layers.norms import add_and_norm
from models.spec.model_spec import ModelSpec


class DenseAndExperts:
    """`models.layers.halves.FeedForward`, which takes the residual as it is. It adds each token's choices to `load`."""

    takes: Rounding | None = None

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        checkpoint: WeightSource,
        prefix: str,
        *,
        load: Tensor,
        ops: Ops,
        collectives: Collectives,
    ) -> None:
        moe, hidden = spec.moe, spec.hidden_size
        assert moe is not None
        self._ops, self._collectives, self._index, self._load = ops, collectives, index, load
        self._routing, self._eps, self._activate = moe.routing, spec.norm_eps, activation_of(spec, ops)

        def vector(name: str, size: int = hidden) -> Tensor:
            return checkpoint.take(f"{prefix}{name}", (size,), torch.float32)

        norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm_1")
        self._before_dense, self._after_dense = (vector(f"{name}.weight") for name in norms)
        norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        self._before_experts, self._after_experts = (vector(f"{name}.weight") for name in norms)
        self._router_norm = vector("router.scale") * hidden**-0.5
        shape = moe.num_experts, hidden
        self._router = checkpoint.take(f"{prefix}router.proj.weight", shape, torch.float32)
        self._expert_scales = vector("router.per_expert_scale", moe.num_experts)
        name = f"{prefix}{spec.mlp_name}."
        self._dense = Mlp(spec, checkpoint, name, spec.intermediate_size, ops, collectives)
        self.held = ops.pack_experts(read_experts(checkpoint, f"{prefix}experts", moe, hidden))
        """As `models.layers.moe.Moe.held`."""

    def __call__(self, x: Activations, step: ForwardStep) -> Tensor:
        assert isinstance(x, Tensor), "norms take floats"
        norm, eps = self._ops.rms_norm, self._eps
        before = add_and_norm(self._ops, x, None, self._before_dense, eps, self._dense.takes)[1]
        dense = norm(self._dense(before, step), self._after_dense, eps)
        logits = self._ops.linear(norm(x.float(), self._router_norm, eps), self._router, None)
        experts, weights = self._ops.route(logits, None, self._routing)
        weights = weights * self._expert_scales[experts]
        count_choices(self._load, experts, step.meta)
        taken = norm(x, self._before_experts, eps)
        out = self._collectives.experts(self._index, taken, experts, weights, self._local)
        return dense + norm(out, self._after_experts, eps)

    def _local(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return self._ops.experts(x, slots, weights, self.held, self._activate)

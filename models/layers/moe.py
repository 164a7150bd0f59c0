"""The feed-forward block in which a router sends every token to some of many experts, and perhaps through shared ones."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import AttentionMeta, Ops
from kernels.rounding import Activations, Rounding
from kernels.torch.experts import scores_of, weights_of
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.expert_weights import read_experts
from models.layers.mlp import Mlp, activation_of
from models.spec.model_spec import ModelSpec, MoeSpec


class Moe:
    """A mixture of all experts of the layer under `prefix`. It adds each token's choices to `load` ((num_experts,) int64)."""

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
        self._routing, self._weighs_inputs = moe.routing, moe.weighs_inputs
        self._activate = activation_of(spec, ops)
        old = f"{prefix}block_sparse_moe."
        block = old if f"{old}{moe.router}.weight" in checkpoint else f"{prefix}{moe.block_name}."
        router, shape = f"{block}{moe.router}", (moe.num_experts, hidden)
        self._router = checkpoint.take(f"{router}.weight", shape, torch.float32)
        self._router_bias = self._choice_bias = self._down_bias = None
        self._shared = self._shared_gate = None
        if moe.router_bias:
            self._router_bias = checkpoint.take(f"{router}.bias", shape[:1], torch.float32)
        is_by_token = bool(moe.by_token) and moe.by_token[index]
        self._of_token = _read_table(spec, moe, checkpoint, f"{router}.tid2eid") if is_by_token else None
        if moe.choice_bias and not is_by_token:
            self._choice_bias = _read_choice_bias(moe, checkpoint, f"{block}{moe.choice_bias}")
        self._latent = _Latent(spec, moe.latent_size, checkpoint, block, ops) if moe.latent_size else None
        self.held = ops.pack_experts(read_experts(checkpoint, f"{block}experts", moe, spec.expert_inputs))
        """The experts in this rank's slots. Between steps others may be put there (`kernels.collectives` sends rows
        accordingly)."""
        if moe.by_turns:
            biases = checkpoint.take(f"{block}experts.down_proj_bias", shape, torch.float32)
            self._down_bias = biases.T.contiguous()
        shared = f"{prefix}{moe.shared_name}"
        if moe.shared_size:
            self._shared = Mlp(spec, checkpoint, f"{shared}.", moe.shared_size, ops, collectives)
        if moe.shared_gate:
            self._shared_gate = checkpoint.take(f"{shared}_gate.weight", (1, hidden))

    def __call__(self, x: Activations, step: ForwardStep) -> Tensor:
        """(T, hidden) -> (T, hidden), normalised before and not yet added to the residual."""
        assert isinstance(x, Tensor), "the router and the experts take floats"
        logits = self._ops.linear(x.float(), self._router, self._router_bias)
        if self._of_token is None:
            experts, weights = self._ops.route(logits, self._choice_bias, self._routing)
        else:
            assert step.tokens is not None, "the stage with these layers has the tokens"
            experts = self._of_token[step.tokens]
            weights = weights_of(scores_of(logits, self._routing), experts, self._routing)
        count_choices(self._load, experts, step.meta)
        taken = x if self._latent is None else self._latent.down(x)
        if self._weighs_inputs:
            taken, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
        out = self._collectives.experts(self._index, taken, experts, weights, self._local)
        if self._latent is not None:
            out = self._latent.up(out)
        if self._down_bias is not None:
            out = out + self._weighted(self._down_bias, experts, weights).to(out.dtype)
        if self._shared is None:
            return out
        shared = self._shared(x, step)
        if self._shared_gate is not None:
            share = self._ops.linear(x, self._shared_gate, None)
            shared = self._ops.by_rows(torch.sigmoid, share) * shared
        return out + shared

    def _local(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return self._ops.experts(x, slots, weights, self.held, self._activate)

    def _weighted(self, biases: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """(hidden, E) -> (T, hidden). Every rank has all of these biases and adds them behind the joins, so that none counts
        twice where several ranks hold parts of one expert."""
        shares = torch.zeros(len(experts), biases.shape[1], device=weights.device)
        return self._ops.linear(shares.scatter_(1, experts, weights), biases, None)


class _Latent:
    """Projections to what experts take and from what they give, which are whole on every rank."""

    def __init__(self, spec: ModelSpec, size: int, checkpoint: WeightSource, block: str, ops: Ops) -> None:
        def projection(name: str, rows: int, columns: int) -> Callable[[Tensor], Tensor]:
            stem = f"{block}{name}_latent_proj"
            weight = ops.pack(checkpoint.matrix(f"{stem}.weight", (rows, columns)), checkpoint.dtype)
            bias = checkpoint.take(f"{stem}.bias", (rows,)) if spec.mlp_bias else None
            return lambda x: ops.linear(x, weight, bias)

        self.down = projection("fc1", size, spec.hidden_size)
        self.up = projection("fc2", spec.hidden_size, size)


def _read_table(spec: ModelSpec, moe: MoeSpec, checkpoint: WeightSource, name: str) -> Tensor:
    """Return (vocab_size, top_k) int64: each token's experts."""
    return checkpoint.take(name, (spec.vocab_size, moe.routing.top_k), torch.int64)


def _read_choice_bias(moe: MoeSpec, checkpoint: WeightSource, name: str) -> Tensor:
    """Return (num_experts,) float32."""
    shape = (1, moe.num_experts) if moe.choice_bias_is_matrix else (moe.num_experts,)
    return checkpoint.take(name, shape, torch.float32).flatten()


def count_choices(load: Tensor, experts: Tensor, meta: AttentionMeta) -> None:
    """Add a step's choices (T, K) to `load` ((num_experts,) int64), but those of rows that only fill it up."""
    counted = meta.counted
    times = torch.ones_like(experts) if counted is None else counted[:, None].expand_as(experts)
    load.index_add_(0, experts.flatten(), times.flatten())

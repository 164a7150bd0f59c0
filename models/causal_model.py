"""What the engine asks of a model, whether Baton or transformers computes its layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.ops import AttentionMeta, ExpertWeights, KVLayer, Ops
from models.lora.low_rank import AdapterWeights
from models.pooling.readout import Readout
from models.spec.model_spec import ModelSpec


class CausalModel(Protocol):
    """All of a model, or the stage of it that has the layers [layers.start, layers.stop)."""

    spec: ModelSpec
    ops: Ops
    dtype: torch.dtype
    layers: range
    is_first: bool
    is_last: bool
    expert_load: Tensor
    """(len(layers), num_experts) int64: how often each layer has chosen each expert, since its reader last set it to zero."""
    bytes_read: int
    adapters: AdapterWeights
    """What lies beside its matrices."""
    readout: Readout
    """What follows a text's pooled hidden state, where the checkpoint embeds."""

    @property
    def experts(self) -> Mapping[int, ExpertWeights]:
        """By the model's index, for layers with experts that other ranks may hold."""
        ...

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        kv: Sequence[KVLayer],
        meta: AttentionMeta,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """`tokens` (T,), or their embeddings or a former stage's hidden (T, hidden_size), which may be overwritten (embeddings
        with what is added behind each of the first `VisionSpec.num_deep` layers are as many times as wide); positions (T,),
        or (3, T) where images lie in a plane: each token's step, row and column (`RopeSpec.axes`)
        -> hidden (T, hidden_size), for the next stage or for `logits`. Writes the tokens' KV into `kv`, which has a tensor for
        each of `layers` that keeps keys and values, or a latent. Layers of transformers take no embeddings.

        `on_layer(l)`, l counting such layers of the whole model, is called as soon as layer l's KV is all in `kv`, and what
        recurrent states lie beside it."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The last stage's hidden (N, hidden_size) -> (N, vocab_size) float32, or as the head's product gives them."""
        ...

"""What the engine asks of a drafting head: a layer of its own that proposes from the target's hidden states.

Its input at position i is what the target says behind token i, and token i + 1. Its state there says token i + 2. In place of
what the target has not computed yet it takes its own state."""

from typing import Protocol

from torch import Tensor

from kernels.ops import AttentionMeta, KVLayer, Ops


class DraftingHead(Protocol):
    ops: Ops

    def read(self, hidden: Tensor) -> Tensor:
        """Return (T, hidden_size) states for `forward`, of the tokens that the target has computed last. `hidden` is what
        `models.causal_model.CausalModel.forward` has returned."""
        ...

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, kv_layer: KVLayer, meta: AttentionMeta
    ) -> Tensor:
        """`tokens` (T,), each behind the one at its position; states (T, hidden_size), the target's or the head's own, which
        may be overwritten; positions (T,) -> states (T, hidden_size). Writes the positions' KV."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """The head's states (N, hidden_size) -> (N, vocab_size) float32 of the target's tokens."""
        ...

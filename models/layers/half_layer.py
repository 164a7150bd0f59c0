"""A layer that mixes tokens or has a feed-forward block, but not both (Nemotron-H)."""

from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import DenseLayer, ExpertWeights, KVLayer, Ops
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.halves import feed_forward, mixer
from models.layers.norms import add_and_norm, read_norm
from models.spec.model_spec import ModelSpec


class HalfLayer:
    """`models.layers.layer.Layer` with one of the two halves."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        checkpoint: WeightSource,
        load: Tensor,
        ops: Ops,
        collectives: Collectives,
    ) -> None:
        prefix = f"model.layers.{index}."
        self._ops, self._eps = ops, spec.norm_eps
        self.experts: ExpertWeights | None = None
        self._mixer = self._mlp = None
        if spec.has_mixer(index):
            block = self._mixer = mixer(spec, index, checkpoint, prefix, ops, collectives)
        else:
            block, self.experts = feed_forward(
                spec, index, checkpoint, prefix, load=load, ops=ops, collectives=collectives
            )
            self._mlp = block
        self._takes = block.takes
        self._norm = read_norm(spec, checkpoint, f"{prefix}{spec.norms.before_attention}.weight")

    def __call__(
        self, x: Tensor, added: Tensor | None, kv_layer: KVLayer, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = add_and_norm(self._ops, x, added, self._norm, self._eps, self._takes)
        if self._mlp is not None:
            return x, self._mlp(normed, step)
        assert self._mixer is not None, "a layer has one of both"
        # Without rows a rank only computes other ranks' on its experts.
        return x, self._mixer(normed, kv_layer, step) if len(x) else x

    def described(self, rotation: int) -> DenseLayer | None:
        """Return None: what is here is less than two halves."""
        del rotation

"""One layer: attention and a feed-forward block, each with norms before or behind it, and added to the residual."""

from torch import Tensor

from kernels.collectives import Collectives
from kernels.ops import DenseLayer, KVLayer, Ops
from models.formats.weight_source import WeightSource
from models.layers.attention import Attention, ForwardStep
from models.layers.halves import feed_forward, mixer
from models.layers.mlp import Mlp
from models.layers.norms import add_and_norm, read_norm
from models.spec.model_spec import ModelSpec


class Layer:
    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        checkpoint: WeightSource,
        load: Tensor,
        ops: Ops,
        collectives: Collectives,
        *,
        prefix: str = "",
    ) -> None:
        """`load` ((num_experts,) int64) counts the choices of this layer's router. `prefix`: the beginning of its tensors' names,
        where it is not that of the model's layer `index`."""
        prefix = prefix or f"model.layers.{index}."
        self._ops, self._eps, self._scale = ops, spec.norm_eps, spec.residual_scale
        self._centred = spec.centred
        self._attention = mixer(spec, index, checkpoint, prefix, ops, collectives)
        self._mlp, self.experts = feed_forward(
            spec, index, checkpoint, prefix, load=load, ops=ops, collectives=collectives
        )

        def norm(name: str) -> Tensor | None:
            return read_norm(spec, checkpoint, f"{prefix}{name}.weight") if name else None

        self._before_attention, self._after_attention = (
            norm(name) for name in (spec.norms.before_attention, spec.norms.after_attention)
        )
        self._before_mlp, self._after_mlp = (
            norm(name) for name in (spec.norms.before_mlp, spec.norms.after_mlp)
        )
        self._is_parallel = spec.one_norm
        self._takes = self._attention.takes
        if self._is_parallel and self._takes != self._mlp.takes:
            self._takes = None

    def __call__(
        self, x: Tensor, added: Tensor | None, kv_layer: KVLayer, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """Take (T, hidden) each: the residual, and what is to be added to it (None for nothing). Returns the same behind this
        layer. `x` may be overwritten."""
        ops, eps = self._ops, self._eps
        x, normed = add_and_norm(ops, x, added, self._before_attention, eps, self._takes)
        # Without rows a rank only computes other ranks' on its experts.
        out = self._attention(normed, kv_layer, step) if len(x) else x
        if self._is_parallel:
            return x, self._added(out + self._mlp(normed, step))
        if self._after_attention is not None:
            out = ops.rms_norm(out, self._after_attention, eps)
        if self._scale != 1.0:
            out = out * self._scale
        x, normed = add_and_norm(ops, x, out, self._before_mlp, eps, self._mlp.takes)
        out = self._mlp(normed, step)
        if self._after_mlp is not None:
            out = ops.rms_norm(out, self._after_mlp, eps)
        return x, out if self._scale == 1.0 else out * self._scale

    def _added(self, out: Tensor) -> Tensor:
        return self._ops.by_rows(centred, out) if self._centred else out

    def described(self, rotation: int) -> DenseLayer | None:
        """Return the layer as data; None where it is of another kind. `rotation`: which of a step's is its own."""
        if not (isinstance(self._attention, Attention) and isinstance(self._mlp, Mlp)):
            return None
        if self._before_attention is None or self._before_mlp is None:
            return None
        attention = self._attention.part(self._before_attention, self._after_attention, rotation)
        mlp = self._mlp.part(self._before_mlp, self._after_mlp)
        if attention is None or mlp is None:
            return None
        return DenseLayer(attention=attention, mlp=mlp, eps=self._eps, residual_scale=self._scale)


def centred(x: Tensor) -> Tensor:
    """Return the rows without their means."""
    return (x - x.float().mean(-1, keepdim=True)).to(x.dtype)

"""A residual of several streams (Xie et al., "mHC: Manifold-Constrained Hyper-Connections", arXiv:2512.24880).

Before each half of a layer the streams are summed up into one row, and behind it that half's result is added to each, with the
streams mixed by a matrix whose rows and columns sum to one. All weights of these sums are made from the streams themselves."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.collectives import Collectives
from kernels.ops import DenseLayer, ExpertWeights, KVLayer, Ops
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.compressed_attention import CompressedAttention
from models.layers.moe import Moe
from models.spec.compressed_spec import StreamsSpec
from models.spec.model_spec import ModelSpec


class _Mixing:
    """How one half of a layer takes the streams and gives them back."""

    def __init__(self, spec: ModelSpec, streams: StreamsSpec, checkpoint: WeightSource, prefix: str) -> None:
        count = streams.num_streams
        self._count, self._iterations, self._eps = count, streams.num_iterations, streams.eps
        self._norm_eps, outputs = spec.norm_eps, count * (2 + count)
        shape = outputs, count * spec.hidden_size
        self._weight = checkpoint.take(f"{prefix}fn", shape, torch.float32)
        self._base = checkpoint.take(f"{prefix}base", (outputs,), torch.float32)
        self._scale = checkpoint.take(f"{prefix}scale", (3,), torch.float32).repeat_interleave(
            torch.tensor((count, count, count * count), device=checkpoint.device)
        )

    def taken(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, streams * hidden) -> (T, hidden), and the weights by which `given` adds (T, streams) and mixes (T, streams,
        streams)."""
        count, eps = self._count, self._eps
        weights = F.linear(_normed(x, self._norm_eps), self._weight) * self._scale + self._base
        take, give, mix = weights.split((count, count, count * count), 1)
        mix = mix.unflatten(1, (count, count)).softmax(-1) + eps
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
        for _ in range(self._iterations - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + eps)
            mix = mix / (mix.sum(-2, keepdim=True) + eps)
        return _summed(x, torch.sigmoid(take) + eps), 2 * torch.sigmoid(give), mix

    def given(self, x: Tensor, out: Tensor, give: Tensor, mix: Tensor) -> Tensor:
        """(T, streams * hidden), (T, hidden) -> (T, streams * hidden)."""
        streams = x.unflatten(1, (self._count, -1))
        mixed = mix.to(x.dtype).mT @ streams
        return (give.to(x.dtype)[..., None] * out[:, None] + mixed).flatten(1)


class StreamedLayer:
    """A layer over several streams, (T, streams * hidden)."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        checkpoint: WeightSource,
        load: Tensor,
        ops: Ops,
        collectives: Collectives,
    ) -> None:
        """See `models.layers.layer.Layer`."""
        assert spec.streams is not None
        prefix = f"model.layers.{index}."
        self._ops, self._eps = ops, spec.norm_eps
        self._attention = CompressedAttention(
            spec, index, checkpoint, f"{prefix}self_attn.", ops, collectives
        )
        self._moe = Moe(spec, index, checkpoint, prefix, load=load, ops=ops, collectives=collectives)
        self.experts: ExpertWeights | None = self._moe.held
        self._before_attention, self._before_moe = (
            checkpoint.take(f"{prefix}{name}.weight", (spec.hidden_size,), torch.float32)
            for name in (spec.norms.before_attention, spec.norms.before_mlp)
        )
        self._around_attention, self._around_moe = (
            _Mixing(spec, spec.streams, checkpoint, f"{prefix}{name}.") for name in ("attn_hc", "ffn_hc")
        )

    def __call__(
        self, x: Tensor, added: Tensor | None, kv_layer: KVLayer, step: ForwardStep
    ) -> tuple[Tensor, None]:
        """Return the streams behind the layer, to which nothing is left to be added."""
        assert added is None, "layers of streams add what they give themselves"
        ops, eps = self._ops, self._eps
        # Without rows a rank only computes other ranks' on its experts.
        if len(x):
            row, give, mix = self._around_attention.taken(x)
            out = self._attention(ops.rms_norm(row, self._before_attention, eps), kv_layer, step)
            x = self._around_attention.given(x, out, give, mix)
        row, give, mix = self._around_moe.taken(x)
        out = self._moe(ops.rms_norm(row, self._before_moe, eps), step)
        return self._around_moe.given(x, out, give, mix), None

    def described(self, rotation: int) -> DenseLayer | None:
        """Return None: it is no layer of one stream."""
        del rotation


class StreamsEnd:
    """The streams behind the last layer as one row."""

    def __init__(self, spec: ModelSpec, streams: StreamsSpec, checkpoint: WeightSource) -> None:
        count, prefix = streams.num_streams, "model.hc_head."
        self._eps, self._norm_eps = streams.eps, spec.norm_eps
        self._weight = checkpoint.take(f"{prefix}hc_fn", (count, count * spec.hidden_size), torch.float32)
        self._base = checkpoint.take(f"{prefix}hc_base", (count,), torch.float32)
        self._scale = checkpoint.take(f"{prefix}hc_scale", (1,), torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        """(T, streams * hidden) -> (T, hidden)."""
        weights = F.linear(_normed(x, self._norm_eps), self._weight) * self._scale + self._base
        return _summed(x, torch.sigmoid(weights) + self._eps)


def _normed(x: Tensor, eps: float) -> Tensor:
    """(T, N) -> the same in float32, with a mean square of one."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _summed(x: Tensor, weights: Tensor) -> Tensor:
    """(T, streams * hidden), (T, streams) float32 -> (T, hidden)."""
    streams = x.unflatten(1, (weights.shape[1], -1))
    return (weights[..., None] * streams).sum(1).to(x.dtype)

"""The forward pass of every supported family: a decoder over packed tokens and a paged KV cache.

Everything that differs between families is data in ModelSpec. This code knows no ranks, requests or phases: sizes come from the
tensors that the checkpoint gives, and ranks meet in `kernels.collectives`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.collectives import ONE_RANK, Collectives
from kernels.ops import AttentionMeta, ExpertWeights, FusedLayers, KVLayer, Ops
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.half_layer import HalfLayer
from models.layers.hyper_connections import StreamedLayer, StreamsEnd
from models.layers.layer import Layer, centred
from models.layers.norms import add_and_norm, read_norm
from models.layers.per_layer_embeddings import LayerInput, LayerInputs
from models.layers.rope import Rotations
from models.layers.scaled_layer import EndedLayer, scalar_of
from models.pooling.readout import NO_READOUT, Readout
from models.spec.kv_places import KVPlaces
from models.spec.model_spec import ModelSpec


class Model:
    """All of a model, or the stage of it that has the layers [layers.start, layers.stop): the embedding is the first stage's, the
    last norm and the head are the last one's."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        checkpoint: WeightSource,
        device: torch.device,
        layers: range | None = None,
        collectives: Collectives = ONE_RANK,
        *,
        readout: Readout = NO_READOUT,
        taps: tuple[int, ...] = (),
    ) -> None:
        """Read the model. `taps` are layers before which the state is kept for a drafting head; one behind the last layer is the
        number of layers. Raises UnsupportedModel when the checkpoint does not fit `spec`."""
        self.spec, self.ops, self.collectives, self.readout = spec, ops, collectives, readout
        self.dtype, self.rounds = checkpoint.dtype, checkpoint.rounds
        self.taps, self.tapped = taps, dict[int, Tensor]()
        """What the last forward pass has kept at each of `taps`, (T, hidden_size)."""
        self.layers = range(spec.num_layers) if layers is None else layers
        self.is_first, self.is_last = self.layers.start == 0, self.layers.stop == spec.num_layers
        self._read_ends(checkpoint)
        num_experts = 0 if spec.moe is None else spec.moe.num_experts
        self.expert_load = torch.zeros(len(self.layers), num_experts, dtype=torch.int64, device=device)
        """How often each of `layers` has chosen each expert, since its reader (expert_load.py) last set it to zero."""
        self._layers = [
            self._read_layer(index, checkpoint, load)
            for index, load in zip(self.layers, self.expert_load, strict=True)
        ]
        self.experts: dict[int, ExpertWeights] = {
            index: layer.experts
            for index, layer in zip(self.layers, self._layers, strict=True)
            if layer.experts is not None
        }
        """By the model's index, for the layers that have any."""
        checkpoint.ignore_under(
            *spec.skipped_prefixes,
            *spec.mtp_layers,
            *(f"model.layers.{i}." for i in range(spec.num_layers) if i not in self.layers),
        )
        self._rotations = Rotations(spec, self.layers, ops, device)
        self._fused = None if taps else self._fuse()
        self.adapters = checkpoint.adapters
        self._places = KVPlaces.of(spec, self.layers)
        self.bytes_read = checkpoint.bytes_read

    def _read_layer(
        self, index: int, checkpoint: WeightSource, load: Tensor
    ) -> Layer | HalfLayer | EndedLayer | StreamedLayer:
        spec, ops = self.spec, self.ops
        if spec.streams is not None:
            return StreamedLayer(spec, index, checkpoint, load, ops, self.collectives)
        if not (spec.has_mixer(index) and spec.has_mlp(index)):
            return HalfLayer(spec, index, checkpoint, load, ops, self.collectives)
        layer = Layer(spec, index, checkpoint, load, ops, self.collectives)
        scalar = scalar_of(spec, checkpoint, index)
        if scalar is None:
            return layer
        takes = None if spec.layer_inputs is None else LayerInput(spec, index, checkpoint, ops)
        return EndedLayer(layer, index, scalar, takes)

    def _read_ends(self, checkpoint: WeightSource) -> None:
        spec, names = self.spec, ("model.embed_tokens.weight", "lm_head.weight")
        table, head = names[0], names[0] if spec.tied else names[1]
        shape = (spec.vocab_size, spec.hidden_size)
        rounds = checkpoint.rounds
        is_shared = spec.tied and (rounds is None or rounds.of_tables == rounds)
        stored = checkpoint.table(table, shape) if self.is_first else None
        self._norm = read_norm(spec, checkpoint, "model.norm.weight") if self.is_last else None
        self._head = None
        if self.is_last:
            is_here = stored is not None and is_shared
            if not (spec.may_lack_head and head not in checkpoint):
                matrix = stored if is_here else checkpoint.matrix(head, shape)
                assert matrix is not None
                self._head = self.ops.pack(matrix, checkpoint.dtype)
        tied = self._head if is_shared else None
        self._rows = None if stored is None else self.ops.look_up(stored, checkpoint.dtype, tied)
        self._streams_end = None
        if spec.streams is not None and self.is_last:
            self._streams_end = StreamsEnd(spec, spec.streams, checkpoint)
        self._inputs = None
        if spec.layer_inputs is not None:
            self._inputs = LayerInputs(spec, checkpoint, self.ops, self.collectives)
        # A scorer's head is models/pooling/readout.py's.
        checkpoint.ignore(*names, "model.norm.weight", "score.weight")

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        kv: Sequence[KVLayer],
        meta: AttentionMeta,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """`models.causal_model.CausalModel.forward`."""
        deep: Sequence[Tensor] = ()
        inputs: Tensor | None = None
        tokens: Tensor | None = None
        spec = self.spec
        if self.is_first and not x.is_floating_point():
            tokens, x = x, self.embed(x)
            inputs = None if self._inputs is None else self._inputs(tokens, x)
            x = x if spec.streams is None else x.repeat(1, spec.streams.num_streams)
        elif x.shape[1] > spec.hidden_size:
            x, *deep = (part.contiguous() for part in x.split(spec.hidden_size, 1))
        rotations, done = self._rotations(positions, x.dtype), None
        is_adapted = meta.adapters and self.adapters
        if self._fused is not None and on_layer is None and not is_adapted and not deep:
            done = self._fused(x, [(each.cos, each.sin) for each in rotations], kv, meta)
        if done is None:
            told = None if self._places.completed else on_layer
            steps = [
                ForwardStep(meta, rotation, told, inputs=inputs, tokens=tokens) for rotation in rotations
            ]
            done = self._layer_by_layer(x, steps, kv, on_layer, deep)
        x, added = done
        if self._streams_end is not None:
            x = self._streams_end(x)
        if self._norm is None:
            return x if added is None else x + added
        normed = add_and_norm(self.ops, x, added, self._norm, self.spec.norm_eps, None)[1]
        assert isinstance(normed, Tensor), "the head's product is one of floats"
        return normed

    def _fuse(self) -> FusedLayers | None:
        described = [
            layer.described(rotation)
            for layer, rotation in zip(self._layers, self._rotations.of_layer, strict=True)
        ]
        known = [layer for layer in described if layer is not None]
        return self.ops.fuse(known) if len(known) == len(described) else None

    def _layer_by_layer(
        self,
        x: Tensor,
        steps: Sequence[ForwardStep],
        kv: Sequence[KVLayer],
        on_layer: Callable[[int], None] | None,
        deep: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual behind the last layer, and what is to be added to it. `steps`: one for each rotation. `deep` is
        added behind the first layers."""
        places = self._places
        added: Tensor | None = None
        self.tapped = {}
        for index, layer in enumerate(self._layers):
            self._keep(index, x, added)
            x, added = layer(x, added, places.layer(kv, index), steps[self._rotations.of_layer[index]])
            if index < len(deep):
                added = deep[index] if added is None else added + deep[index]
            if on_layer is not None and index in places.completed:
                on_layer(places.completed[index])
        self._keep(len(self._layers), x, added)
        return x, added

    def _keep(self, index: int, x: Tensor, added: Tensor | None) -> None:
        if index in self.taps:
            self.tapped[index] = x.clone() if added is None else x + added

    def embed(self, tokens: Tensor) -> Tensor:
        """The first stage's tokens (T,) -> (T, hidden_size)."""
        assert self._rows is not None, "only the first stage has the embedding"
        x, scale = self.collectives.embed(tokens, self._rows, self.dtype), self.spec.embedding_scale
        x = x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)
        return self.ops.by_rows(centred, x) if self.spec.centred else x

    def logits(self, hidden: Tensor) -> Tensor:
        """`models.causal_model.CausalModel.logits`; (N, 1) of a checkpoint without a head, from which nothing but token 0 can be
        sampled."""
        assert self.is_last, "only the last stage has the head"
        if self._head is None:
            return hidden.new_zeros(len(hidden), 1, dtype=torch.float32)
        logits = self.collectives.gather_logits(self.ops.linear(hidden, self._head, None))
        if self.spec.logit_divisor != 1.0:
            logits = logits.float() / self.spec.logit_divisor
        cap = self.spec.logit_soft_cap
        return self.ops.by_rows(torch.tanh, logits.float() / cap) * cap if cap else logits

"""The layer for multi-token prediction that checkpoints of DeepSeek-V3 and GLM-4-MoE have behind their own layers, and those of
Qwen3-Next under names of its own (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.2).

It joins the next token's embedding to the model's last state, both normalised, and passes them through one more layer, which
attends. The embedding and the head are the model's: checkpoints repeat them."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.ops import AttentionMeta, KVLayer
from models.causal_model import CausalModel
from models.formats.checkpoint import Checkpoint, Shard, whole
from models.formats.dummy_weights import DummyWeights
from models.formats.tensor_files import holds_tensor
from models.formats.weight_source import WeightSource
from models.layers.attention import ForwardStep
from models.layers.layer import Layer
from models.layers.norms import add_and_norm, read_norm
from models.layers.rope import Rotations
from models.model import Model
from models.spec.model_spec import LoadFormat, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """What a checkpoint calls the tensors of the layer that no other layer has, without `.weight`."""

    token_norm: str
    state_norm: str
    join: str
    last_norm: str


def with_mtp_layer(spec: ModelSpec) -> ModelSpec:
    """Return the model with the first layer for multi-token prediction among its own: it is as the last ones that attend."""
    moe, kept, mla = spec.moe, spec.recurrent, spec.mla
    if mla is not None and mla.index is not None:
        mla = replace(mla, index=replace(mla.index, chooses=(*mla.index.chooses, True)))
    return replace(
        spec,
        num_layers=spec.num_layers + 1,
        mtp_layers=(),
        windows=(*spec.windows, 0),
        mla=mla,
        moe=moe and replace(moe, sparse=(*moe.sparse, True)),
        recurrent=kept and replace(kept, kinds=(*kept.kinds, "kv")),
    )


def check_mtp(spec: ModelSpec, folder: Path, load_format: LoadFormat) -> None:
    """Raise UnsupportedModel where the model in `folder` has no such layer, or its checkpoint came without it."""
    if not spec.mtp_layers:
        raise UnsupportedModel(
            f"engine.speculate is mtp, but {spec.architecture} has no layer for multi-token prediction "
            "(num_nextn_predict_layers in config.json): draft by ngram, suffix or a draft model"
        )
    name = f"{_names(spec.mtp_layers[0]).token_norm}.weight"
    if load_format != "dummy" and not holds_tensor(folder, name):
        raise UnsupportedModel(
            f"engine.speculate is mtp, but the checkpoint in {folder} was saved without the layer for multi-token prediction: it "
            f"has no {name}. Use the original checkpoint, or draft by ngram, suffix or a draft model"
        )


@torch.inference_mode()
def load_mtp(
    folder: Path,
    target: CausalModel,
    device: torch.device,
    load_format: LoadFormat = "auto",
    shard: Shard = whole,
) -> "MtpHead":
    """Load the layer beside the model of its folder, of which this rank has `shard` and all layers. Raises ConfigError and
    UnsupportedModel."""
    assert isinstance(target, Model), "transformers' models have none"
    spec, dtype = target.spec, target.dtype
    if load_format == "dummy":
        dummies = DummyWeights.of(spec, target.ops.keeps, dtype, device, shard, rounds=target.rounds)
        return MtpHead(target, dummies, device)
    keeps, rounds = target.ops.keeps, target.rounds
    checkpoint = Checkpoint(folder, dtype, device, shard, spec.quantisation, keeps, rounds=rounds)
    head = MtpHead(target, checkpoint, device)
    checkpoint.close()
    return head


def _names(layer: str) -> _Names:
    if layer.startswith("mtp."):
        return _Names(
            token_norm="mtp.pre_fc_norm_embedding",
            state_norm="mtp.pre_fc_norm_hidden",
            join="mtp.fc",
            last_norm="mtp.norm",
        )
    return _Names(
        token_norm=f"{layer}enorm",
        state_norm=f"{layer}hnorm",
        join=f"{layer}eh_proj",
        last_norm=f"{layer}shared_head.norm",
    )


class MtpHead:
    """See `models.drafting.drafting_head.DraftingHead`."""

    def __init__(self, target: Model, checkpoint: WeightSource, device: torch.device) -> None:
        self._target, self.ops = target, target.ops
        spec, index = with_mtp_layer(target.spec), target.spec.num_layers
        prefix, hidden = target.spec.mtp_layers[0], spec.hidden_size
        names = _names(prefix)
        self._eps = spec.norm_eps
        self._token_norm, self._state_norm, self._last_norm = (
            read_norm(spec, checkpoint, f"{name}.weight")
            for name in (names.token_norm, names.state_norm, names.last_norm)
        )
        join = checkpoint.matrix(f"{names.join}.weight", (hidden, 2 * hidden))
        self._join = self.ops.pack(join, checkpoint.dtype)
        num_experts = 0 if spec.moe is None else spec.moe.num_experts
        # The experts of this layer stay where they are, so nobody reads how often each is chosen.
        chosen = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._layer = Layer(spec, index, checkpoint, chosen, self.ops, target.collectives, prefix=prefix)
        self._rotations = Rotations(spec, range(index, index + 1), self.ops, device)
        _ignore_others(target.spec, checkpoint)

    def read(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, kv_layer: KVLayer, meta: AttentionMeta
    ) -> Tensor:
        ops, eps = self.ops, self._eps
        said = ops.rms_norm(states, self._state_norm, eps)
        both = torch.cat((ops.rms_norm(self._target.embed(tokens), self._token_norm, eps), said), -1)
        (rotation,) = self._rotations(positions, both.dtype)
        step = ForwardStep(meta, rotation, None)
        x, added = self._layer(ops.linear(both, self._join, None), None, kv_layer, step)
        normed = add_and_norm(ops, x, added, self._last_norm, eps, None)[1]
        assert isinstance(normed, Tensor), "the head's product is one of floats"
        return normed

    def logits(self, states: Tensor) -> Tensor:
        return self._target.logits(states)


def _ignore_others(spec: ModelSpec, checkpoint: WeightSource) -> None:
    """Leave the model's own tensors to it, and those that this layer repeats of them, and further such layers."""
    layer, *others = spec.mtp_layers
    checkpoint.ignore(f"{layer}embed_tokens.weight", f"{layer}shared_head.head.weight")
    checkpoint.ignore_under(
        "model.embed_tokens.",
        "model.norm.",
        "lm_head.",
        *others,
        *(prefix for prefix in spec.skipped_prefixes if not layer.startswith(prefix)),
        *(f"model.layers.{index}." for index in range(spec.num_layers)),
    )

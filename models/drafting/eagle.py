"""EAGLE-3 heads in the layout in which they are published (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large
Language Models via Training-Time Test", 2025).

`fc` makes one state of the target's at three places within its layers. One layer attends from that state and the next token's
embedding side by side. The head knows a part of the vocabulary: `d2t` says how far each of its tokens is from the target's."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.collectives import ONE_RANK
from kernels.cpu.prepacked import WeightFormat
from kernels.ops import AttentionMeta, KVLayer, Ops
from kernels.select import Kernels, select_ops
from models.causal_model import CausalModel
from models.families.dense import llama
from models.formats.checkpoint import Checkpoint, whole
from models.formats.tensor_files import holds_tensor, read_tensors
from models.layers.attention import Attention, ForwardStep
from models.layers.attention_cases import attention_cases
from models.layers.mlp import Mlp
from models.layers.norms import add_and_norm, read_norm
from models.layers.rope import Rotations
from models.model import Model
from models.spec.config_fields import count
from models.spec.model_spec import ModelSpec, read_json

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLM")
_EMBEDDING = "embed_tokens.weight"
_NUM_TAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    layer: ModelSpec
    """A model of the head's one layer and its part of the vocabulary."""
    taps: tuple[int, ...]
    """The target's layers before which it reads the state; one behind the last layer is its number of layers."""
    target_size: int
    """The target's hidden_size."""
    has_embedding: bool
    """Whether it has one of its own, of all of the target's tokens, in place of the target's."""


def read_eagle(folder: Path, target: ModelSpec) -> EagleSpec:
    """Return the head in `folder`, without touching its weights. Raises ConfigError, and UnsupportedModel where it is not one, or
    not one of `target`."""
    config = read_json(folder / "config.json")
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in _ARCHITECTURES or "draft_vocab_size" not in config:
        raise UnsupportedModel(
            f"{folder} has architecture {name!r}, which is no EAGLE-3 head in the published layout "
            f"({_ARCHITECTURES[0]}, with draft_vocab_size)"
        )
    try:
        layer = replace(
            llama({**config, "vocab_size": count(config, "draft_vocab_size"), "tie_word_embeddings": False}),
            quantisation=None,
        )
    except KeyError as error:
        raise UnsupportedModel(f"config.json of the EAGLE-3 head in {folder} lacks {error}") from None
    spec = EagleSpec(
        layer=layer,
        taps=_taps(config, target),
        target_size=int(config.get("target_hidden_size") or layer.hidden_size),
        has_embedding=holds_tensor(folder, _EMBEDDING),
    )
    _check(spec, config, folder, target)
    return spec


def _taps(config: dict[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """Return where the head reads. A config names the layers whose output it is; heads without that read low, middle and high."""
    given = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if given:
        return tuple(int(index) + 1 for index in given)
    return (2, target.num_layers // 2, target.num_layers - 3)


def _check(spec: EagleSpec, config: dict[str, Any], folder: Path, target: ModelSpec) -> None:
    here, layer = f"the EAGLE-3 head in {folder}", spec.layer
    if layer.num_layers != 1 or config.get("norm_before_residual"):
        raise UnsupportedModel(
            f"{here} has num_hidden_layers {layer.num_layers} and norm_before_residual "
            f"{bool(config.get('norm_before_residual'))}: one layer without that is supported"
        )
    if config.get("vocab_size") != target.vocab_size or spec.target_size != target.hidden_size:
        raise UnsupportedModel(
            f"{here} is for a model with vocab_size {config.get('vocab_size')} and hidden_size {spec.target_size}; "
            f"{target.architecture} has {target.vocab_size} and {target.hidden_size}. Use the head that was made for this model"
        )
    if not spec.has_embedding and layer.hidden_size != target.hidden_size:
        raise UnsupportedModel(
            f"{here} has hidden_size {layer.hidden_size} and no embed_tokens of its own, which need the target's "
            f"{target.hidden_size}"
        )
    if len(spec.taps) != _NUM_TAPS or not all(0 <= tap <= target.num_layers for tap in spec.taps):
        raise UnsupportedModel(
            f"{here} reads states before layers {spec.taps}; {target.architecture} has {target.num_layers} layers, and "
            f"{_NUM_TAPS} places are read"
        )


@torch.inference_mode()
def load_eagle(
    folder: Path,
    target: CausalModel,
    device: torch.device,
    *,
    kernels: Kernels = "auto",
    block_size: int = 16,
    weights: WeightFormat = "full",
) -> "EagleHead":
    """Load the head beside its target, of which this rank has all layers, and which keeps the states that the head reads. Raises
    ConfigError and UnsupportedModel."""
    assert isinstance(target, Model), "transformers' models keep no states within"
    spec = read_eagle(folder, target.spec)
    assert set(spec.taps) <= set(target.taps)
    cases = attention_cases(spec.layer, whole, range(1), target.dtype, block_size)
    kv_dtype = str(target.dtype).removeprefix("torch.")
    ops = select_ops(device, kernels, cases, kv_dtype, weights, deterministic=False)
    checkpoint = Checkpoint(folder, target.dtype, device, keeps=ops.keeps)
    head = EagleHead(spec, target, ops, checkpoint, _token_ids(folder, spec, target.spec), device)
    checkpoint.close()
    return head


def _token_ids(folder: Path, spec: EagleSpec, target: ModelSpec) -> Tensor | None:
    """Return (draft_vocab_size,) int64, the target's number of each of the head's tokens. None where they are the same."""
    offsets = read_tensors(folder, ["d2t"]).get("d2t")
    size = spec.layer.vocab_size
    if offsets is None and size == target.vocab_size:
        return None
    if offsets is None or offsets.shape != (size,):
        raise UnsupportedModel(
            f"the EAGLE-3 head in {folder} has {size} of {target.vocab_size} tokens, and no d2t that says which"
        )
    ids = torch.arange(size) + offsets.long()
    if not bool(((ids >= 0) & (ids < target.vocab_size)).all()):
        raise UnsupportedModel(f"d2t of the EAGLE-3 head in {folder} names tokens that the target has not")
    return ids


class EagleHead:
    """See `models.drafting.drafting_head.DraftingHead`."""

    def __init__(
        self,
        spec: EagleSpec,
        target: Model,
        ops: Ops,
        checkpoint: Checkpoint,
        token_ids: Tensor | None,
        device: torch.device,
    ) -> None:
        layer, size = spec.layer, spec.layer.hidden_size
        self.ops, self._target, self._eps = ops, target, layer.norm_eps
        self._vocab_size, self._taps = target.spec.vocab_size, spec.taps
        self._token_ids = None if token_ids is None else token_ids.to(device)
        # A checkpoint with an embedding is named as a decoder without its head is.
        stem = "model." if spec.has_embedding else ""
        self._embedding = None
        if spec.has_embedding:
            self._embedding = checkpoint.take(stem + _EMBEDDING, (self._vocab_size, size))
        joining = checkpoint.matrix(f"{stem}fc.weight", (size, len(spec.taps) * spec.target_size))
        self._joining = ops.pack(joining, checkpoint.dtype)
        prefix = f"{stem}midlayer."
        self._token_norm, self._state_norm, self._mlp_norm, self._last_norm = (
            read_norm(layer, checkpoint, f"{name}.weight")
            for name in (
                f"{prefix}input_layernorm",
                f"{prefix}hidden_norm",
                f"{prefix}post_attention_layernorm",
                f"{stem}norm",
            )
        )
        self._attention = Attention(
            layer, 0, checkpoint, f"{prefix}self_attn.", ops, ONE_RANK, input_size=2 * size
        )
        self._mlp = Mlp(layer, checkpoint, f"{prefix}mlp.", layer.intermediate_size, ops, ONE_RANK)
        head = checkpoint.matrix("lm_head.weight", (layer.vocab_size, size))
        self._head = ops.pack(head, checkpoint.dtype)
        checkpoint.ignore(f"{stem}d2t", f"{stem}t2d")
        self._rotations = Rotations(layer, range(1), ops, device)

    def read(self, hidden: Tensor) -> Tensor:
        within = [self._target.tapped[tap] for tap in self._taps]
        return self.ops.linear(torch.cat(within, -1), self._joining, None)

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, kv_layer: KVLayer, meta: AttentionMeta
    ) -> Tensor:
        ops, eps, table = self.ops, self._eps, self._embedding
        embedded = self._target.embed(tokens) if table is None else table[tokens]
        said = ops.rms_norm(states, self._state_norm, eps)
        both = torch.cat((ops.rms_norm(embedded, self._token_norm, eps), said), -1)
        (rotation,) = self._rotations(positions, both.dtype)
        step = ForwardStep(meta, rotation, None)
        out = self._attention(both, kv_layer, step)
        x, normed = add_and_norm(ops, states, out, self._mlp_norm, eps, self._mlp.takes)
        return x + self._mlp(normed, step)

    def logits(self, states: Tensor) -> Tensor:
        normed = self.ops.rms_norm(states, self._last_norm, self._eps)
        logits = self.ops.linear(normed, self._head, None)
        if self._token_ids is None:
            return logits
        wide = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return wide.index_copy_(1, self._token_ids, logits)

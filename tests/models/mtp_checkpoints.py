"""Tiny checkpoints with a layer for multi-token prediction, and what that layer says by DeepSeek's report: the block is transformers'."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteDecoderLayer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from tests.models.checkpoints import FAMILIES, HYBRID, VOCAB, make
from tests.parallel.families import awkward

_BLOCKS: dict[str, Any] = {
    "deepseek_v3": DeepseekV3DecoderLayer,
    "glm4_moe": Glm4MoeDecoderLayer,
    "glm4_moe_lite": Glm4MoeLiteDecoderLayer,
    "deepseek_v32": DeepseekV32DecoderLayer,
    "glm_moe_dsa": GlmMoeDsaDecoderLayer,
    "qwen3_next": Qwen3NextDecoderLayer,
    "qwen3_5": Qwen3_5DecoderLayer,
    "qwen3_5_moe": Qwen3_5MoeDecoderLayer,
}
MTP_FAMILIES = tuple(_BLOCKS)
_QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""What Qwen3-Next's and Qwen3.5's checkpoints call what DeepSeek's call otherwise."""


@dataclass(frozen=True, slots=True)
class MtpReference:
    target: Any
    block: Any
    own: dict[str, Tensor]
    """enorm, hnorm, eh_proj and shared_head.norm"""

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], drafts: Sequence[int] = (), first: int = 0) -> Tensor:
        """What comes behind `tokens` and then behind each of `drafts` -> (1 + len(drafts), vocab_size). The target has
        computed all tokens but the last, of whose states those from `first` on are known."""
        states = self.target.model(torch.tensor([tokens])).last_hidden_state[0, first:-1]
        followed = [*tokens[first + 1 :]]
        out = self._states(states, followed)
        last = [out[-1]]
        for draft in drafts:
            followed.append(draft)
            states = torch.cat((states, out[-1:]))
            out = self._states(states, followed)
            last.append(out[-1])
        return self.target.lm_head(torch.stack(last))

    def _states(self, states: Tensor, followed: Sequence[int]) -> Tensor:
        model, count = self.target.model, len(followed)
        embedded = model.embed_tokens(torch.tensor(followed))
        both = torch.cat((self._norm(embedded, "enorm"), self._norm(states, "hnorm")), -1)
        x = F.linear(both, self.own["eh_proj"])[None]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotations = model.rotary_emb(x, positions)
        out = self.block(x, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
        if isinstance(out, tuple):  # with the tokens that were chosen
            out = out[0]
        return self._norm(out[0], "shared_head.norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.target.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self.own[name]


def make_mtp(
    folder: Path, family: str, i: int = 0, vocab_size: int = VOCAB, config: Any = None
) -> MtpReference:
    """Random weights everywhere. `i` varies the family as in `checkpoints`, where no `config` is given."""
    config = config or {**FAMILIES, **HYBRID}[family](random.Random(family), i)
    config.vocab_size = vocab_size
    return with_mtp(folder, make(folder, config, seed=2), family)


def with_mtp(folder: Path, target: Any, family: str) -> MtpReference:
    """Add a layer of random weights to the checkpoint of `target` in `folder`, which is one file."""
    hidden = target.config.hidden_size
    block = _block(target.config, family).float().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.6 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn_like(parameter) * spread + (parameter.ndim == 1))
        for name, buffer in block.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    own = {name: 1 + 0.3 * torch.randn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    return _saved(folder, MtpReference(target, block, own))


def _block(config: Any, family: str) -> Any:
    """A layer as the model's last ones that attend are: with experts."""
    if not family.startswith(("qwen", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")):
        return _BLOCKS[family](config, config.num_hidden_layers)
    alone = copy.deepcopy(config)
    alone.num_hidden_layers, alone.layer_types = 1, ["full_attention"]
    alone.mlp_only_layers, alone.decoder_sparse_step, alone.mlp_layer_types = [], 1, ["sparse"]
    if hasattr(alone, "indexer_types"):
        alone.indexer_types = ["full"]
    return _BLOCKS[family](alone, 0)


def make_right_mtp(folder: Path, vocab_size: int = VOCAB, family: str = "deepseek_v3") -> MtpReference:
    """Make a model in which a token depends on the one before it alone, so that its layer can be right about the next ones:
    whatever attention, states and experts say is multiplied by zero."""
    config = awkward(family) if family in HYBRID else None
    reference = make_mtp(folder, family, vocab_size=vocab_size, config=config)
    with torch.no_grad():
        for module in (reference.target, reference.block):
            for name, parameter in module.named_parameters():
                if any(last in name for last in ("o_proj", "out_proj", "down_proj")):
                    parameter.zero_()
    hidden = reference.target.config.hidden_size
    ones = torch.ones(hidden)
    own = {
        "enorm": ones,
        "hnorm": ones.clone(),
        "shared_head.norm": reference.target.model.norm.weight.detach() + _offset(reference.target),
    }
    own["eh_proj"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    reference.target.save_pretrained(folder)
    return _saved(folder, MtpReference(reference.target, reference.block, own))


def _is_qwen(target: Any) -> bool:
    return target.config.model_type.startswith("qwen")


def _offset(target: Any) -> float:
    """What is added to a norm's weights."""
    return 1.0 if _is_qwen(target) else 0.0


def _saved(folder: Path, reference: MtpReference) -> MtpReference:
    """Add the layer to the target's checkpoint, as published ones have it."""
    added = _as_qwen(reference) if _is_qwen(reference.target) else _as_deepseek(reference)
    file = folder / "model.safetensors"
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in added.items()}
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return reference


def _as_deepseek(reference: MtpReference) -> dict[str, Tensor]:
    """Behind the model's own layers, with the embedding and the head repeated."""
    target, prefix = reference.target, f"model.layers.{reference.target.config.num_hidden_layers}."
    shared = {"embed_tokens": target.model.embed_tokens.weight, "shared_head.head": target.lm_head.weight}
    layer = {
        **reference.block.state_dict(),
        **{f"{name}.weight": tensor for name, tensor in (reference.own | shared).items()},
    }
    return {prefix + name: tensor for name, tensor in layer.items()}


def _as_qwen(reference: MtpReference) -> dict[str, Tensor]:
    """Under names of its own. Norms are stored as offsets from one."""
    layer = {f"mtp.layers.0.{name}": tensor for name, tensor in reference.block.state_dict().items()}
    own = {
        f"mtp.{_QWEN_NAMES[name]}.weight": tensor - (_offset(reference.target) if tensor.ndim == 1 else 0.0)
        for name, tensor in reference.own.items()
    }
    return layer | own

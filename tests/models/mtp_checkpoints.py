"""Tiny checkpoints with a layer for multi-token prediction, and what that layer says by DeepSeek's report: the block is transformers'."""

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
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer

from tests.models.checkpoints import FAMILIES, VOCAB, make

_BLOCKS: dict[str, Any] = {"deepseek_v3": DeepseekV3DecoderLayer, "glm4_moe": Glm4MoeDecoderLayer}
MTP_FAMILIES = tuple(_BLOCKS)


@dataclass(frozen=True, slots=True)
class MtpReference:
    target: Any
    block: Any
    own: dict[str, Tensor]
    """enorm, hnorm, eh_proj and shared_head.norm"""

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], guesses: Sequence[int] = (), first: int = 0) -> Tensor:
        """What comes behind `tokens` and then behind each of `guesses` -> (1 + len(guesses), vocab_size). The target has computed
        all tokens but the last, of whose states those from `first` on are known."""
        states = self.target.model(torch.tensor([tokens])).last_hidden_state[0, first:-1]
        followed = [*tokens[first + 1 :]]
        out = self._states(states, followed)
        last = [out[-1]]
        for guess in guesses:
            followed.append(guess)
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
        return self._norm(out[0], "shared_head.norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.target.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self.own[name]


def make_mtp(folder: Path, family: str, i: int = 0, vocab_size: int = VOCAB) -> MtpReference:
    """Random weights everywhere. `i` varies the family as in `checkpoints`."""
    config = FAMILIES[family](random.Random(family), i)
    config.vocab_size = vocab_size
    return with_mtp(folder, make(folder, config, seed=2), family)


def with_mtp(folder: Path, target: Any, family: str) -> MtpReference:
    """Add a layer of random weights to the checkpoint of `target` in `folder`, which is one file."""
    config, hidden = target.config, target.config.hidden_size
    block = _BLOCKS[family](config, config.num_hidden_layers).float().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.6 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn_like(parameter) * spread + (parameter.ndim == 1))
        block.mlp.gate.e_score_correction_bias.copy_(torch.randn(config.n_routed_experts) * 0.3)
    own = {name: 1 + 0.3 * torch.randn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    return _saved(folder, MtpReference(target, block, own))


def make_right_mtp(folder: Path, vocab_size: int = VOCAB) -> MtpReference:
    """Make a DeepSeek-V3 in which a token depends on the one before it alone, so that its layer can be right about the next ones:
    whatever attention and experts say is multiplied by zero."""
    reference = make_mtp(folder, "deepseek_v3", vocab_size=vocab_size)
    with torch.no_grad():
        for module in (reference.target, reference.block):
            for name, parameter in module.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    parameter.zero_()
    hidden = reference.target.config.hidden_size
    ones = torch.ones(hidden)
    own = {
        "enorm": ones,
        "hnorm": ones.clone(),
        "shared_head.norm": reference.target.model.norm.weight.detach(),
    }
    own["eh_proj"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    reference.target.save_pretrained(folder)
    return _saved(folder, MtpReference(reference.target, reference.block, own))


def _saved(folder: Path, reference: MtpReference) -> MtpReference:
    """Add the layer to the target's checkpoint, as published ones have it: with the embedding and the head repeated."""
    target, prefix = reference.target, f"model.layers.{reference.target.config.num_hidden_layers}."
    shared = {"embed_tokens": target.model.embed_tokens.weight, "shared_head.head": target.lm_head.weight}
    layer = {
        **reference.block.state_dict(),
        **{f"{name}.weight": tensor for name, tensor in (reference.own | shared).items()},
    }
    file = folder / "model.safetensors"
    added = {prefix + name: tensor.detach().clone().contiguous() for name, tensor in layer.items()}
    save_file(load_file(file) | added, file, metadata={"format": "pt"})
    return reference

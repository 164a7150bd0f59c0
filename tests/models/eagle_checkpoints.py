"""Tiny EAGLE-3 heads in the published layout, and what they say by their definition, written out in plain PyTorch."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tests.models.checkpoints import VOCAB, make

EPS, THETA = 1e-5, 10000.0


@dataclass(frozen=True, slots=True)
class EagleReference:
    target: Any
    own: dict[str, Tensor]
    taps: tuple[int, ...]
    num_heads: int

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], drafts: Sequence[int] = (), first: int = 0) -> Tensor:
        """What comes behind `tokens` and then behind each of `drafts` -> (1 + len(drafts), vocab_size). The target has
        computed all tokens but the last, of whose states those from `first` on are known."""
        said = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        states = torch.cat([said[tap][0, first:-1] for tap in self.taps], -1) @ self.own["fc.weight"].T
        followed = [*tokens[first + 1 :]]
        out = self._states(states, followed)
        last = [out[-1]]
        for draft in drafts:
            followed.append(draft)
            states = torch.cat((states, out[-1:]))
            out = self._states(states, followed)
            last.append(out[-1])
        logits = _norm(torch.stack(last), self.own["norm.weight"]) @ self.own["lm_head.weight"].T
        wide = torch.full((len(last), self.target.config.vocab_size), -torch.inf)
        wide[:, torch.arange(logits.shape[1]) + self.own["d2t"]] = logits
        return wide

    def _states(self, states: Tensor, followed: Sequence[int]) -> Tensor:
        own, count = {key.removeprefix("midlayer."): value for key, value in self.own.items()}, len(followed)
        embedding = own.get("embed_tokens.weight", self.target.model.embed_tokens.weight)
        embedded = _norm(embedding[torch.tensor(followed)], own["input_layernorm.weight"])
        both = torch.cat((embedded, _norm(states, own["hidden_norm.weight"])), -1)
        q, k, v = (
            (both @ own[f"self_attn.{name}_proj.weight"].T)
            .view(count, -1, own["head_dim"].item())
            .transpose(0, 1)
            for name in "qkv"
        )
        q, k = _rotated(q), _rotated(k)
        k, v = (each.repeat_interleave(self.num_heads // len(each), 0) for each in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5 + torch.full((count, count), -torch.inf).triu(1)
        x = states + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T
        normed = _norm(x, own["post_attention_layernorm.weight"])
        gate, up = (normed @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _rotated(x: Tensor) -> Tensor:
    """(heads, count, dim), whose halves are rotated against each other."""
    count, dim = x.shape[1:]
    angles = torch.arange(count)[:, None] * THETA ** (-torch.arange(0, dim, 2) / dim)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def make_target(folder: Path, num_heads: int = 4, num_kv_heads: int = 2, vocab_size: int = VOCAB) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=40, num_hidden_layers=5, num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads, max_position_embeddings=128, rms_norm_eps=EPS, eos_token_id=1, bos_token_id=0,
        pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return make(folder, config, seed=2)


def make_eagle(
    folder: Path,
    target: Any,
    *,
    draft_vocab: int = 40,
    own_embedding: bool = False,
    reads: Sequence[int] = (),
) -> EagleReference:
    """A head of random weights. `reads`: the layers whose output it takes, where its config says so."""
    rng, size, dim, heads, kv_heads, inner = random.Random(3), target.config.hidden_size, 8, 4, 2, 24
    vocab_size = target.config.vocab_size
    shapes = {
        "fc": (size, 3 * size),
        "midlayer.self_attn.q_proj": (heads * dim, 2 * size),
        "midlayer.self_attn.k_proj": (kv_heads * dim, 2 * size),
        "midlayer.self_attn.v_proj": (kv_heads * dim, 2 * size),
        "midlayer.self_attn.o_proj": (size, heads * dim),
        "midlayer.mlp.gate_proj": (inner, size),
        "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner),
        "lm_head": (draft_vocab, size),
        **({"embed_tokens": (vocab_size, size)} if own_embedding else {}),
    }
    torch.manual_seed(3)
    own = {f"{name}.weight": 1.5 * torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        own[f"midlayer.{name}.weight"] = 1 + 0.3 * torch.randn(size)
    own["norm.weight"] = 1 + 0.3 * torch.randn(size)
    ids = torch.tensor(sorted(rng.sample(range(vocab_size), draft_vocab)))
    own["d2t"] = ids - torch.arange(draft_vocab)
    return save_eagle(folder, target, own, (heads, kv_heads, dim, inner), reads)


def make_right_eagle(
    folder: Path, target_folder: Path, vocab_size: int = VOCAB, num_heads: int = 1
) -> EagleReference:
    """Make a target in which a token depends on the one before it alone, and a head whose first draft token is right: all that it
    attends to is the token at the place itself, and others of the same name."""
    target, size = make_target(target_folder, num_heads, 1, vocab_size), 32
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
    target.save_pretrained(target_folder)
    one, none = torch.eye(size), torch.zeros(size, size)
    own = {
        f"midlayer.self_attn.{name}_proj.weight": torch.cat((factor * one, none), 1)
        for name, factor in (("q", 9.0), ("k", 9.0), ("v", 1.0))
    }
    own |= {
        "midlayer.self_attn.o_proj.weight": one,
        "midlayer.mlp.gate_proj.weight": none.clone(),
        "midlayer.mlp.up_proj.weight": none.clone(),
        "midlayer.mlp.down_proj.weight": none.clone(),
        "fc.weight": torch.zeros(size, 3 * size),
        "norm.weight": target.model.norm.weight.detach().clone(),
        "lm_head.weight": target.lm_head.weight.detach().clone(),
        "d2t": torch.zeros(vocab_size, dtype=torch.int64),
        **{
            f"midlayer.{name}.weight": torch.ones(size)
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
    }
    return save_eagle(folder, target, own, (1, 1, size, size))


def save_eagle(
    folder: Path,
    target: Any,
    own: dict[str, Tensor],
    shape: tuple[int, int, int, int],
    reads: Sequence[int] = (),
) -> EagleReference:
    heads, kv_heads, dim, inner = shape
    num_layers, vocab_size = target.config.num_hidden_layers, target.config.vocab_size
    draft_vocab, size = len(own["d2t"]), target.config.hidden_size
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": vocab_size, "draft_vocab_size": draft_vocab,
        "hidden_size": size, "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": dim, "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 64, "hidden_act": "silu",
        "torch_dtype": "float32",
    }  # fmt: skip
    if reads:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(reads)}
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(draft_vocab) + own["d2t"]] = True
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**own, "t2d": t2d}, folder / "model.safetensors", metadata={"format": "pt"})
    taps = tuple(at + 1 for at in reads) or (2, num_layers // 2, num_layers - 3)
    return EagleReference(target, own | {"head_dim": torch.tensor(dim)}, taps, heads)

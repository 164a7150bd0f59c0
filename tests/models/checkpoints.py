"""Tiny models of every family, made by transformers, and a paged pool to run ours on."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from kernels.ops import AttentionMeta, StateBlocks
from models.causal_model import CausalModel
from tests.models import config_parts
from tests.models.compressed_families import deepseek_v4
from tests.models.config_parts import CONTEXT, ROPES, common, deepseek, qwen_experts, rope
from tests.models.gemma4_families import gemma4, gemma4_moe, gemma4_small
from tests.models.indexed_families import deepseek_v32, glm_moe_dsa
from tests.models.newer_families import (
    cohere,
    cohere2,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    growing,
    hunyuan_dense,
    hunyuan_moe,
    minimax_m2,
    ministral3,
    seed_oss,
    smollm3,
)
from tests.models.recent_families import (
    gemma3,
    glm4,
    glm4_first,
    glm4_moe,
    granite,
    granite_moe,
    llama4,
    olmo2,
    olmo3,
    phi3,
)
from tests.models.recurrent_families import (
    granite4,
    granite_hybrid,
    kimi_linear,
    lfm2,
    nemotron_h,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)

VOCAB, BLOCK = config_parts.VOCAB, 4
CPU = torch.device("cpu")
torch.set_num_threads(1)  # two that share busy cores are many times slower than one


def llama(rng: random.Random, i: int) -> Any:
    return transformers.LlamaConfig(
        **common(rng),
        rope_parameters=rope(rng, ROPES[i]),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
    )


def mistral(rng: random.Random, i: int) -> Any:
    return transformers.MistralConfig(
        **common(rng), rope_parameters=rope(rng, ROPES[i]), sliding_window=(None, 7, 16, 33, 5, 64)[i]
    )


def qwen2(rng: random.Random, i: int) -> Any:
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1} if i % 2 else {}
    fields = common(rng)
    fields.pop("head_dim")
    fields["hidden_size"] = 8 * fields["num_attention_heads"] * 2
    return transformers.Qwen2Config(**fields, rope_parameters=rope(rng, ROPES[i]), **window)


def qwen3(rng: random.Random, i: int) -> Any:
    window = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1} if i % 2 else {}
    return transformers.Qwen3Config(
        **common(rng), rope_parameters=rope(rng, ROPES[i]), attention_bias=rng.random() < 0.5, **window
    )


def gemma2(rng: random.Random, i: int) -> Any:
    fields = common(rng)
    fields["tie_word_embeddings"] = True
    caps = (
        {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        if i == 5
        else {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}
    )
    return transformers.Gemma2Config(
        **fields,
        query_pre_attn_scalar=rng.choice((8, 24)),
        sliding_window=rng.choice((6, 16)),
        rope_parameters=rope(rng, ROPES[i]),
        **caps,
    )


def mixtral(rng: random.Random, i: int) -> Any:
    return transformers.MixtralConfig(
        **common(rng),
        rope_parameters=rope(rng, ROPES[i]),
        sliding_window=(None, 9)[i % 2],
        num_local_experts=rng.choice((3, 8)),
        num_experts_per_tok=rng.choice((1, 2, 3)),
    )


def qwen2_moe(rng: random.Random, i: int) -> Any:
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2} if i % 2 else {}
    fields = qwen_experts(rng, i)
    fields.pop("head_dim")
    fields["hidden_size"] = 8 * fields["num_attention_heads"] * 2
    return transformers.Qwen2MoeConfig(**fields, **window, shared_expert_intermediate_size=20)


def qwen3_moe(rng: random.Random, i: int) -> Any:
    window = {"use_sliding_window": True, "sliding_window": 11} if i % 2 else {}
    return transformers.Qwen3MoeConfig(**qwen_experts(rng, i), attention_bias=rng.random() < 0.5, **window)


def deepseek_v2(rng: random.Random, i: int) -> Any:
    groups: dict[str, Any] = {}
    if i % 2:
        groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    return transformers.DeepseekV2Config(**deepseek(rng, i), **groups, mlp_bias=i == 1)


def deepseek_v3(rng: random.Random, i: int) -> Any:
    return transformers.DeepseekV3Config(
        **deepseek(rng, i),
        n_group=(1, 4)[i % 2],
        topk_group=(1, 2)[i % 2],
        norm_topk_prob=i != 2,
        rope_interleave=i != 3,
    )


def glm4_moe_lite(rng: random.Random, i: int) -> Any:
    fields = deepseek(rng, i)
    dense = fields.pop("first_k_dense_replace")
    sparse = fields["num_hidden_layers"] - dense
    kinds = None if i == 1 else ["dense"] * dense + ["sparse"] * sparse
    return transformers.Glm4MoeLiteConfig(
        **fields, mlp_layer_types=kinds, norm_topk_prob=i != 2, rope_interleave=i != 3
    )


def mistral4(rng: random.Random, i: int) -> Any:
    """As published: the second."""
    # transformers reads it as the decoder of a model that sees, and as no model of its own. Not while modules are imported: this
    # imports Triton (`tests.test_forked`).
    transformers.AutoModelForCausalLM.register(
        transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
    )
    fields = {**deepseek(rng, i), "rope_parameters": growing(rng, i)}
    return transformers.Mistral4Config(
        **fields,
        n_group=(1, 4)[i % 2],
        topk_group=(1, 2)[i % 2],
        norm_topk_prob=i != 2,
        rope_interleave=i != 3,
    )


def gpt_oss(rng: random.Random, i: int) -> Any:
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False,
        "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}  # fmt: skip
    return transformers.GptOssConfig(
        **common(rng),
        rope_parameters=yarn if i % 2 == 0 else rope(rng, ROPES[i]),
        sliding_window=rng.choice((7, 16)),
        num_local_experts=rng.choice((4, 7)),
        num_experts_per_tok=rng.choice((1, 3)),
        swiglu_limit=(0.5, 7.0)[i % 2],
        layer_types=["full_attention", "sliding_attention", "full_attention"] if i == 3 else None,
    )


DENSE = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "granite": granite,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "phi3": phi3,
    "glm": glm4_first,
    "glm4": glm4,
    "ministral3": ministral3,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "exaone4": exaone4,
    "ernie4_5": ernie4_5,
    "hunyuan": hunyuan_dense,
    "cohere": cohere,
    "cohere2": cohere2,
}
SPARSE = {
    "gemma4_moe": gemma4_moe,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "granite4": granite4,
    "granite_moe": granite_moe,
    "glm4_moe": glm4_moe,
    "llama4": llama4,
    "minimax_m2": minimax_m2,
    "glm4_moe_lite": glm4_moe_lite,
    "mistral4": mistral4,
    "deepseek_v32": deepseek_v32,
    "glm_moe_dsa": glm_moe_dsa,
    "dots1": dots1,
    "ernie4_5_moe": ernie4_5_moe,
    "hunyuan_moe": hunyuan_moe,
}
HYBRID = {
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "granite_hybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
}
UNSTAGED = {"gemma4_small": gemma4_small}
COMPRESSED = {"deepseek_v4": deepseek_v4}
"""Families whose layers cannot be shared out over stages."""
FAMILIES = {**DENSE, **SPARSE, **UNSTAGED}


def make(folder: Path, config: Any, seed: int, **saving: Any) -> Any:
    """The reference; its checkpoint is in `folder`, in many files where `seed` is odd."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.6 / parameter.shape[-1] ** 0.5
            if "embed" in name:
                spread = 1.0
            if "per_layer_input_gate" in name:  # which takes the residual as it is
                spread /= 16
            if ("linear_attn" in name or "mixer.in_proj" in name) and parameter.ndim > 1:
                # With more, transformers' own logits of a prompt in pieces are 1e-4 off those of the whole.
                spread /= 2
            parameter.add_(torch.randn_like(parameter) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
            if name.endswith("tid2eid"):
                table = torch.rand(len(buffer), config.n_routed_experts).argsort(-1)
                buffer.copy_(table[:, : buffer.shape[1]])
            if name.endswith("layer_scalar"):
                buffer.mul_(0.5 + torch.rand_like(buffer))
    model.save_pretrained(folder, max_shard_size="20KB" if seed % 2 else "1GB", **saving)
    return model


class Paged:
    """Several sequences in one pool with shuffled block tables; computes any part of any of them in a step.

    What nobody has written is NaN, so that nobody can have read it."""

    def __init__(
        self,
        model: CausalModel,
        num_seqs: int,
        rng: random.Random,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        layout = model.spec.kv_layout(BLOCK, str(dtype).removeprefix("torch."))
        self.num_state_blocks = layout.state_blocks
        per_seq = CONTEXT // BLOCK + layout.state_blocks
        shape = (num_seqs * per_seq, layout.num_planes, layout.num_kv_heads, BLOCK, layout.head_dim)
        self.kv = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(layout.num_layers)]
        ids = list(range(num_seqs * per_seq))
        rng.shuffle(ids)
        self.tables = [np.array(ids[i * per_seq : (i + 1) * per_seq]) for i in range(num_seqs)]
        self.model = model

    @torch.inference_mode()
    def step(
        self,
        parts: list[tuple[int, int, list[int]]],
        on_layer: Callable[[int], None] | None = None,
        adapters: Mapping[int, str] | None = None,
    ) -> list[torch.Tensor]:
        """(sequence, start, tokens) each -> logits (count, vocab) each. `adapters`: those of sequences that have one."""
        tokens = [t for _, _, part in parts for t in part]
        spans = [np.arange(start, start + len(part)) for _, start, part in parts]
        slots = np.concatenate(
            [
                self.tables[s][span // BLOCK + self.num_state_blocks] * BLOCK + span % BLOCK
                for (s, _, _), span in zip(parts, spans, strict=True)
            ]
        )
        meta = AttentionMeta.build(
            [len(part) for _, _, part in parts],
            [start + len(part) for _, start, part in parts],
            [
                self.tables[s][self.num_state_blocks :][: -(-(start + len(part)) // BLOCK)]
                for s, start, part in parts
            ],
            slots,
            self.kv[0].device,
            states=self._states(parts) if self.num_state_blocks else None,
        )
        if adapters:
            meta = replace(meta, adapters=_rows(parts, adapters))
        hidden = self.model.forward(
            torch.tensor(tokens, device=self.kv[0].device),
            torch.from_numpy(np.concatenate(spans)).to(self.kv[0].device),
            self.kv,
            meta,
            on_layer,
        )
        return list(self.model.logits(hidden).float().split([len(part) for _, _, part in parts]))

    def _states(self, parts: list[tuple[int, int, list[int]]]) -> StateBlocks:
        device = self.kv[0].device
        blocks = np.stack([self.tables[s][: self.num_state_blocks] for s, _, _ in parts])
        begins = torch.tensor([start == 0 for _, start, _ in parts], device=device)
        return StateBlocks(torch.from_numpy(blocks).to(device), begins)


def _rows(parts: list[tuple[int, int, list[int]]], adapters: Mapping[int, str]) -> dict[str, torch.Tensor]:
    of_rows = [adapters.get(seq, "") for seq, _, part in parts for _ in part]
    return {
        name: torch.tensor([row for row, own in enumerate(of_rows) if own == name])
        for name in set(of_rows) - {""}
    }

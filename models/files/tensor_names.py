"""What a decoder's checkpoint calls its tensors, whatever larger model it was saved in."""

import re
from collections.abc import Callable, Collection

_STEM = "model."
_TEXTS = ("language_model.", "text_model.")
_OTHERS = (
    (re.compile(r"backbone\."), _STEM),
    (re.compile(r"model\.embeddings\."), "model.embed_tokens."),
    (re.compile(r"model\.(norm_f|embedding_norm)\."), "model.norm."),
    (re.compile(r"(model\.layers\.\d+\.self_attn\.)out_proj\b"), r"\1o_proj"),
    (re.compile(r"(model\.layers\.\d+\.self_attn\.[qk])_layernorm\b"), r"\1_norm"),
    (re.compile(r"(model\.layers\.\d+\.)mixer\.(?=[qkvo]_proj\b)"), r"\1self_attn."),
    (re.compile(r"(model\.layers\.\d+\.)mixer\.(?=(in|out)_proj\b|conv1d\.|A_log|D$|dt_bias|norm\.)"), r"\1mamba."),
    (re.compile(r"(model\.layers\.\d+\.)mixer\."), r"\1mlp."),
)  # fmt: skip
"""How Nemotron-H's names begin, of which all blocks are mixers, and what stands in their place."""
_DEEPSEEK_V4 = re.compile(r"(^|\.)hc_(attn|ffn|head)_")
"""Found in some names of each checkpoint that DeepSeek-V4's authors have written, and of no other."""
_RENAMED = (
    (r"\.scale$", ".weight_scale_inv"),
    (r"^(model\.)?(?=(layers|norm|hc_head_))", "model."),
    (r"^(model\.)?embed\.", "model.embed_tokens."),
    (r"^(model\.)?head\.", "lm_head."),
    (r"\.attn\.indexer\.compressor\.", ".attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".attn.compressor.indexer."),
    (r"\.(compressor|indexer|attn)\.norm\.", r".\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.attn\.", ".self_attn."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"hc_head_", "hc_head.hc_"),
    (r"\.ffn\.", ".mlp."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wq_([ab])\.", r".q_\1_proj."),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
)
"""What is replaced in the names of such a checkpoint, one after the other."""


def decoders_name(name: str, *, is_headless: bool) -> str:
    """Return what a decoder's checkpoint calls the tensor `name`. One that was saved without its head has no prefix, and one that
    is a part of a larger model has the larger model's."""
    if is_headless:
        return name if name == "lm_head.weight" else _STEM + name
    for text in _TEXTS:
        if name.startswith(_STEM + text):
            return _STEM + name.removeprefix(_STEM + text)
    name = name.removeprefix(_TEXTS[0])
    for beginning, meant in _OTHERS:
        if found := beginning.match(name):
            name = found.expand(meant) + name[found.end() :]
    return name


def decoders_names(names: Collection[str]) -> Callable[[str], str]:
    """Return `decoders_name` for a checkpoint with tensors of these names. Kimi-Linear's calls its delta attention as it calls
    attention, and its experts otherwise than its dense blocks: here they are in `delta_attn` and `mlp`."""
    if any(_DEEPSEEK_V4.search(name) for name in names):
        return _of_deepseek_v4
    is_headless = "embed_tokens.weight" in names
    deltas = {
        decoders_name(name, is_headless=is_headless).removesuffix("A_log")
        for name in names
        if name.endswith("self_attn.A_log")
    }

    def renamed(name: str) -> str:
        found = decoders_name(name, is_headless=is_headless)
        layer, attention, rest = found.partition("self_attn.")
        if layer + attention in deltas:
            return f"{layer}delta_attn.{rest}"
        return found.replace(".block_sparse_moe.", ".mlp.") if deltas else found

    return renamed


def _of_deepseek_v4(name: str) -> str:
    for pattern, instead in _RENAMED:
        name = re.sub(pattern, instead, name)
    return name

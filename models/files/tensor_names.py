"""What a decoder's checkpoint calls its tensors, whatever larger model it was saved in."""

import re
from collections.abc import Callable, Collection

_STEM = "model."
_TEXTS = ("language_model.", "text_model.")
_OTHERS = (
    (re.compile(r"backbone\."), _STEM),
    (re.compile(r"model\.embeddings\."), "model.embed_tokens."),
    (re.compile(r"model\.norm_f\."), "model.norm."),
    (re.compile(r"(model\.layers\.\d+\.)mixer\.(?=[qkvo]_proj\b)"), r"\1self_attn."),
    (re.compile(r"(model\.layers\.\d+\.)mixer\.(?=(in|out)_proj\b|conv1d\.|A_log|D$|dt_bias|norm\.)"), r"\1mamba."),
    (re.compile(r"(model\.layers\.\d+\.)mixer\."), r"\1mlp."),
)  # fmt: skip
"""How Nemotron-H's names begin, of which all blocks are mixers, and what stands in their place."""


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

"""What a decoder's checkpoint calls its tensors, whatever larger model it was saved in."""

import re

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

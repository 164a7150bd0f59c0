"""What a decoder's checkpoint calls its tensors, whatever larger model it was saved in."""

_STEM = "model."
_TEXTS = ("language_model.", "text_model.")


def decoders_name(name: str, *, is_headless: bool) -> str:
    """Return what a decoder's checkpoint calls the tensor `name`. One that was saved without its head has no prefix, and one that
    is a part of a larger model has the larger model's."""
    if is_headless:
        return name if name == "lm_head.weight" else _STEM + name
    for text in _TEXTS:
        if name.startswith(_STEM + text):
            return _STEM + name.removeprefix(_STEM + text)
    return name.removeprefix(_TEXTS[0])

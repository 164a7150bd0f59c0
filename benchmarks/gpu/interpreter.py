"""Triton's interpreter without the greater part of its work, which is looking for what it has to replace.

Before each launch, and again before each call of one of Triton's functions by another (`tl.sum` and `tl.cdiv` are such), it looks
through the whole of `triton.language` for what NumPy is to do in place of a GPU. It finds the same each time."""

from collections.abc import Callable
from typing import Any


class _Kept:
    """What a launch would undo its replacements with."""

    def restore(self) -> None: ...


def replace_once() -> None:
    """Let it look once for each module that has kernels, and keep what it has replaced: this process only interprets."""
    from triton.runtime import interpreter  # noqa: PLC0415 (some builds for GPUs lack it)

    replace: Callable[[Any], Any] = interpreter._patch_lang
    done, kept = set[str](), _Kept()

    def replace_of_module(function: Any) -> _Kept:
        if function.__module__ not in done:
            replace(function)
            done.add(function.__module__)
        return kept

    interpreter._patch_lang = replace_of_module

"""How transformers reads a checkpoint's config.json."""

from pathlib import Path
from typing import Any

from core.errors import UnsupportedModel


def transformers_config(folder: Path, architecture: str, *, text_alone: bool = False) -> Any:
    """Return its configuration of the folder, or the part of it that reads text. Raises UnsupportedModel by name."""
    from huggingface_hub.errors import StrictDataclassError  # noqa: PLC0415 (comes with the next)
    from transformers import AutoConfig  # noqa: PLC0415 (seconds, which Baton's own architectures do not need)

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return config.get_text_config() if text_alone else config
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise refused(architecture, f"transformers does not read its config.json: {error}") from None


def refused(architecture: str, why: str) -> UnsupportedModel:
    """Return what to raise. `why` is a clause."""
    return UnsupportedModel(f"architecture {architecture!r} is not supported: {why}")

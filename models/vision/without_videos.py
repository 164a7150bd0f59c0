"""Processors of transformers that read videos, too: without what reads those, which needs torchvision."""

from pathlib import Path
from typing import Any

_PARTS = ["image_processor", "tokenizer"]
_VIDEOS = "video_processor"


def processor_without_videos(folder: Path, name: str) -> Any:
    """Return the processor in `folder`, of transformers' class `name`. None where that has nothing for videos, or is none. Raises
    ImportError, OSError and ValueError."""
    from transformers import AutoImageProcessor, AutoTokenizer  # noqa: PLC0415 (seconds)
    from transformers.models.auto.processing_auto import processor_class_from_name  # noqa: PLC0415

    kind: Any = processor_class_from_name(name) if name else None
    if kind is None or _VIDEOS not in kind.get_attributes():
        return None
    own = type(name, (kind,), {"get_attributes": classmethod(lambda _: _PARTS)})
    said, _ = kind.get_processor_dict(folder, local_files_only=True)
    said.pop(_VIDEOS, None)
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    return own.from_args_and_dict(
        (images, AutoTokenizer.from_pretrained(folder, local_files_only=True)), said
    )

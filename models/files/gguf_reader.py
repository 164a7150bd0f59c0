"""Opens GGUF files and reads their metadata. No torch: ingresses do so, too."""

from pathlib import Path
from typing import Any, Final

from core.errors import ConfigError

BYTES: Final = {
    "F32": 4.0,
    "F16": 2.0,
    "BF16": 2.0,
    "Q8_0": 1 + 2 / 32,
    "Q4_0": 0.5 + 2 / 32,
    "Q4_K": 2.0,
    "Q5_K": 2.0,
    "Q6_K": 2.0,
}
"""The types that are read, and the bytes that a CPU keeps of a number."""
ROPE_FACTORS: Final = "rope_freqs.weight"


def library() -> Any:
    """The package `gguf`. Raises ConfigError."""
    try:
        import gguf  # noqa: PLC0415 (an extra)
    except ImportError:
        raise ConfigError("reading GGUF needs the package gguf: pip install 'baton-serve[gguf]'") from None
    return gguf


def open_gguf(path: Path) -> Any:
    """`gguf.GGUFReader`. Raises ConfigError."""
    reader = library().GGUFReader
    try:
        return reader(str(path))
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"cannot read {path}: {error} (an incomplete download?)") from None


def field(reader: Any, key: str, default: Any = None) -> Any:
    """Return a value of the file's metadata."""
    found = reader.fields.get(key)
    return default if found is None else found.contents()

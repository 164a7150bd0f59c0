"""Opens GGUF files and reads their metadata. No torch: ingresses do so, too."""

from pathlib import Path
from typing import Any, Final

from core.errors import ConfigError

IN_16_BITS: Final = (
    "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS",
    "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip
"""The types for which CPUs have no kernel, and which have 16 bits there."""
BYTES: Final = {
    "F32": 4.0,
    "F16": 2.0,
    "BF16": 2.0,
    "Q8_0": 1 + 2 / 32,
    "Q4_0": 0.5 + 2 / 32,
    **dict.fromkeys(IN_16_BITS, 2.0),
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

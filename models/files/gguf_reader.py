"""Opens GGUF files and reads their metadata. No torch: ingresses do so, too."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from core.errors import ConfigError

BYTES: Final = {
    "F32": 4.0,
    "F16": 2.0,
    "BF16": 2.0,
    **dict.fromkeys(("Q8_0", "Q5_0", "IQ4_NL", "IQ4_XS", "MXFP4"), 1 + 2 / 32),
    **dict.fromkeys(("Q5_1", "Q5_K", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S"), 1 + 4 / 32),
    **dict.fromkeys(("Q6_K", "NVFP4"), 1 + 2 / 16),
    **dict.fromkeys(("IQ2_S", "IQ2_XS", "IQ1_M"), 1 + 4 / 16),
    "Q4_0": 0.5 + 2 / 32,
    **dict.fromkeys(("Q4_1", "Q4_K"), 0.5 + 4 / 32),
    "Q3_K": 0.5 + 2 / 16,
    "Q2_K": 0.5 + 4 / 16,
    **dict.fromkeys(("TQ1_0", "TQ2_0"), 0.5 + 2 / 256),
}
"""The types that are read, and the bytes that a CPU keeps of a number (`models/formats/gguf_blocks.py`)."""
_TOGETHER: Final = re.compile(r"attn_[qkv]\.weight$|ffn_(gate|up)\.weight$")
"""Matrices that become one."""
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


def kept_bytes(types: Mapping[str, tuple[str, int]]) -> float:
    """Return the bytes that a CPU keeps of a number, in the mean of matrices. `types`: by name the type, and how many numbers."""
    together = dict[str, list[str]]()
    for name, (kind, _) in types.items():
        together.setdefault(_joined_name(name), []).append(kind)
    kept = {name: _joined_bytes(kinds) for name, kinds in together.items()}
    total = sum(count * kept[_joined_name(name)] for name, (_, count) in types.items())
    return total / max(1, sum(count for _, count in types.values()))


def _joined_name(name: str) -> str:
    return _TOGETHER.sub(lambda found: found[0][:4], name)


def _joined_bytes(kinds: Sequence[str]) -> float:
    """Return the bytes of a number of such matrices as one (`kernels.packed.joined`): of unlike ones, at the most."""
    each = [BYTES[kind] for kind in kinds]
    if len(set(kinds)) == 1:
        return each[0]
    return 4.0 if max(each) >= 2 else 1 + 6 / 16 if max(each) >= 1 else 0.5 + 4 / 16


def field(reader: Any, key: str, default: Any = None) -> Any:
    """Return a value of the file's metadata."""
    found = reader.fields.get(key)
    return default if found is None else found.contents()

"""Opens GGUF files and reads their metadata. No torch: ingresses do so, too."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from core.errors import ConfigError, UnsupportedModel
from models.files.gguf_metadata import TensorInfo, read_header

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
_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_LAYER: Final = re.compile(r"blk\.\d+\.")
_MISSING: Final = object()
_NUMBERS: Final = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}
"""Types that numpy has, too."""


def library() -> Any:
    """The package `gguf`. Raises ConfigError."""
    try:
        import gguf  # noqa: PLC0415 (an extra)
    except ImportError:
        raise ConfigError("reading GGUF needs the package gguf: pip install 'baton-serve[gguf]'") from None
    return gguf


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """Inputs first."""
    tensor_type: Any
    """`gguf.GGMLQuantizationType`"""
    data: np.ndarray
    """Rows of numbers, or of the bytes of blocks."""


def parts_of(path: Path) -> list[Path]:
    """Return all files of a model that is in several, by the name of any of them. Raises ConfigError."""
    found = _PART.search(path.name)
    if found is None:
        return [path]
    stem, count = path.name[: found.start()], int(found[2])
    parts = [path.with_name(f"{stem}-{part:05}-of-{found[2]}.gguf") for part in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ConfigError(f"{path} is one of {count} files, of which {missing[0]} is not beside it")
    return parts


class Gguf:
    """The metadata and tensors of a model's files, the first of which has all metadata."""

    def __init__(self, paths: list[Path]) -> None:
        """Raises ConfigError."""
        self.name = paths[0].name
        headers = [read_header(path) for path in paths]
        self.metadata = headers[0][0]
        self.mapped = [np.memmap(path, np.uint8, "r") for path in paths]
        self.tensors = {
            info.name: _stored(paths[part], self.mapped[part], info)
            for part, (_, infos) in enumerate(headers)
            for info in infos
        }
        self.architecture = str(self.metadata.get("general.architecture"))
        self._of_layers = {name[found.end() :] for name in self.tensors if (found := _LAYER.match(name))}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's."""
        found = self.metadata.get(f"{self.architecture}.{key}", default)
        return list(found) if isinstance(found, tuple) else found

    def need(self, key: str) -> Any:
        """Raises UnsupportedModel."""
        if (found := self.get(key, _MISSING)) is _MISSING:
            raise UnsupportedModel(f"{self.name} lacks {self.architecture}.{key}")
        return found

    def has(self, name: str) -> bool:
        """Return whether some layer has this tensor."""
        return name in self._of_layers

    def numbers(self, name: str) -> np.ndarray | None:
        """Return a small tensor's numbers; None where there is none."""
        tensor = self.tensors.get(name)
        return (
            None
            if tensor is None
            else library().dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        )


def most(value: Any) -> Any:
    """Return the value of the layers that have one, where the file has one for each layer."""
    return max(value) if isinstance(value, list) else value


def _stored(path: Path, mapped: np.ndarray, info: TensorInfo) -> FileTensor:
    """Raises ConfigError."""
    gguf = library()
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
    except ValueError:
        raise ConfigError(
            f"tensor {info.name!r} of {path.name} has a type that is not known, {info.kind}"
        ) from None
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    inputs, *others = info.sizes
    end = info.offset + inputs * math.prod(others) // numbers * size
    if end > len(mapped):
        raise ConfigError(
            f"cannot read {path}: it ends before its tensor {info.name!r} (an incomplete download?)"
        )
    data = mapped[info.offset : end]
    if kind.name in _NUMBERS:
        return FileTensor(
            info.name, info.sizes, kind, data.view(_NUMBERS[kind.name]).reshape(info.sizes[::-1])
        )
    return FileTensor(info.name, info.sizes, kind, data.reshape(*others[::-1], inputs // numbers * size))


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

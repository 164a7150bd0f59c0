"""Reads the metadata of a GGUF file, and where its tensors lie. The package `gguf` takes fifty times as long for a vocabulary."""

import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from core.errors import ConfigError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The format that `struct` has for each type of number."""
_STRING, _ARRAY, _ALIGNMENT = 8, 9, 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    sizes: tuple[int, ...]
    """Inputs first, as the file has them."""
    kind: int
    """llama.cpp's number of its type."""
    offset: int
    """Where it begins in the file."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Return every key and value. Raises ConfigError."""
    return _read(path, lambda reader: reader.metadata())


def read_header(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Return the metadata, and all tensors. Raises ConfigError."""
    return _read(path, lambda reader: (reader.metadata(), reader.tensors()))


def _read(path: Path, read: Callable[["_Reader"], Any]) -> Any:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return read(_Reader(content))
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"cannot read {path}: {error} (an incomplete download?)") from None


class _Reader:
    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 0
        self._num_tensors, self._alignment = 0, _ALIGNMENT

    def metadata(self) -> dict[str, Any]:
        if self._content[:4] != _MAGIC:
            raise ValueError("it does not begin as GGUF files do")
        version, self._num_tensors, count = struct.unpack_from("<IQQ", self._content, 4)
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version} of GGUF, of which 2 and 3 are read")
        self._at = 24
        found = {self._string(): self._value() for _ in range(count)}
        self._alignment = int(found.get("general.alignment", _ALIGNMENT))
        return found

    def tensors(self) -> list[TensorInfo]:
        """Return what stands behind the metadata."""
        found = [self._tensor() for _ in range(self._num_tensors)]
        start = -(-self._at // self._alignment) * self._alignment
        return [TensorInfo(name, sizes, kind, start + offset) for name, sizes, kind, offset in found]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._numbers("I", 1)
        sizes = self._numbers("Q", dimensions)
        (kind,), (offset,) = self._numbers("I", 1), self._numbers("Q", 1)
        return name, sizes, kind, offset

    def _value(self) -> Any:
        (kind,) = self._numbers("I", 1)
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._numbers(self._format(kind), 1)[0]

    def _array(self) -> Sequence[Any]:
        kind, count = struct.unpack_from("<IQ", self._content, self._at)
        self._at += 12
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        return self._numbers(self._format(kind), count)

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{kind}"
        found = struct.unpack_from(layout, self._content, self._at)
        self._at += struct.calcsize(layout)
        return found

    def _string(self) -> str:
        start = self._at + 8
        self._at = start + int.from_bytes(self._content[start - 8 : start], "little")
        if self._at > len(self._content):
            raise ValueError("it ends within its metadata")
        return self._content[start : self._at].decode()

    @staticmethod
    def _format(kind: int) -> str:
        if (found := _NUMBERS.get(kind)) is None:
            raise ValueError(f"it has a value of the type {kind}, which is not known")
        return found

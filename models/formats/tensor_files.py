"""The tensors of a checkpoint's files, by their names there."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ConfigError
from kernels.cpu.pages import give_back_freed
from models.files.cuts import part_at
from models.files.gguf_folder import WEIGHTS
from models.files.tensor_names import decoders_names
from models.formats.gguf_file import GgufFile
from models.formats.stored_matrix import Cut
from models.spec.model_spec import read_json

_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
"""By safetensors' names of dtypes. Numbers of all others take one."""
MOST_MAPPED_BYTES, _LEAST_MAPPED_BYTES, _MOST_TIMES = 64 << 20, 8 << 20, 128
"""Files are mapped anew once a 128th of their bytes was read, but never after less than the second or more than the first of
these sizes."""


class TensorFiles:
    """The safetensors files of a folder, single or sharded, or its GGUF file.

    See `models.formats.stored_matrix.StoredTensors`."""

    def __init__(self, folder: Path, *, decoders: bool = False) -> None:
        """With `decoders` tensors have the names that a decoder's checkpoint has. Raises ConfigError."""
        self._files = {path: _open(path) for path in _files(folder)}
        places = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        renamed = decoders_names(places) if decoders else str
        self._where = {renamed(name): (path, name) for name, path in places.items()}
        """The file of each tensor, and its name there."""
        self._notes = {
            renamed(name): note for file in self._files.values() for name, note in _notes(file).items()
        }
        whole_bytes = sum(path.stat().st_size for path in self._files)
        self._most_mapped_bytes = min(MOST_MAPPED_BYTES, max(_LEAST_MAPPED_BYTES, whole_bytes // _MOST_TIMES))
        self._mapped_bytes, self._mapped_files = 0, set[Path]()
        """What was read of the files since they were mapped."""
        self.bytes_read = 0
        """Bytes of tensors, as they are in the files."""

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def dtype_of(self, name: str) -> str | None:
        return self.piece(name).get_dtype() if name in self._where else None

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.piece(name).get_shape())

    def stored_name(self, name: str) -> str:
        """Return what the tensor is called in its file."""
        return self._where[name][1]

    def bytes_of(self, name: str) -> int:
        """Return a tensor's bytes, by its header."""
        return prod(self.shape_of(name)) * _DTYPE_BYTES.get(self.piece(name).get_dtype(), 1)

    def note(self, name: str) -> str | None:
        return self._notes.get(name)

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        path, stored = self._where[name]
        tensor = part_at(self.piece(name), cut) if cut else self._files[path].get_tensor(stored)
        self.count(name, tensor.nbytes)
        return tensor

    def piece(self, name: str) -> Any:
        """Return what safetensors calls a slice, or a GGUF file's tensor: indexing it reads just those bytes."""
        path, stored = self._where[name]
        return self._files[path].get_slice(stored)

    def count(self, name: str, num_bytes: int) -> None:
        """Count what was read. Tensors lie in a file's mapping, which goes when none does any more: where they are copied, or
        packed one after the other, this rank has little of the files in its memory."""
        self.bytes_read += num_bytes
        self._mapped_bytes += num_bytes
        self._mapped_files.add(self._where[name][0])
        if self._mapped_bytes > self._most_mapped_bytes:
            self._files |= {path: _mapped_anew(path, self._files[path]) for path in self._mapped_files}
            self._mapped_bytes, self._mapped_files = 0, set()
            give_back_freed()

    def close(self) -> None:
        self._files.clear()
        self._where.clear()
        give_back_freed()


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Whole tensors by name, those that the folder's safetensors files have. Raises ConfigError."""
    found: dict[str, Tensor] = {}
    for file in map(_open, _files(folder)):
        found |= {name: file.get_tensor(name) for name in set(names).intersection(file.keys())}
    return found


def holds_tensor(folder: Path, name: str) -> bool:
    """Return whether a checkpoint's files have this tensor, by their headers. Raises ConfigError."""
    return any(name in file.keys() for file in map(_open, _files(folder)))  # noqa: SIM118


def count_weights(folder: Path, prefixes: tuple[str, ...] = ("",)) -> int:
    """Count the numbers in a checkpoint's files, by their headers, of the tensors whose names begin so. Raises ConfigError."""
    return sum(
        prod(file.get_slice(name).get_shape())
        for file in map(_open, _files(folder))
        for name in file.keys()  # noqa: SIM118
        if name.startswith(prefixes)
    )


def _open(path: Path) -> Any:
    if path.suffix == ".gguf":
        return GgufFile(path)
    try:
        return safe_open(path, "pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error} (an incomplete download?)") from None


def _notes(file: Any) -> dict[str, str]:
    return {} if isinstance(file, GgufFile) else file.metadata() or {}


def _mapped_anew(path: Path, file: Any) -> Any:
    if isinstance(file, GgufFile):
        file.give_back()
        return file
    return _open(path)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = [WEIGHTS if (folder / WEIGHTS).exists() else "model.safetensors"]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not (folder / name).exists():
            raise ConfigError(f"{folder} has no {name}: the model's weights are missing (safetensors only)")
    return [folder / name for name in names]

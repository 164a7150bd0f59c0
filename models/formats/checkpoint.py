"""Reads a checkpoint's tensors by name, and only the part of each that this rank holds.

A tensor that no model asks for, or that is missing, is an error that names it."""

import logging
import re
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ConfigError, UnsupportedModel
from kernels.cpu.pages import give_back_freed
from kernels.packed import Kind, Unread, Weight, on_device, tensors_of
from models.files.gguf_folder import WEIGHTS
from models.files.tensor_names import decoders_name
from models.formats.gguf_file import BLOCK, BLOCKS, GgufFile, GgufTensor
from models.formats.matrix_ways import find_matrix, parts_of
from models.formats.packed import divided
from models.formats.stored_matrix import Cut, StoredMatrix, require_shape
from models.lora.low_rank import AdapterWeights, no_adapters
from models.spec.model_spec import read_json
from models.spec.quantisation import Quantisation

Shard = Callable[[str, tuple[int, ...]], Cut]
"""(name in the checkpoint, full shape) -> what this rank holds of it."""
MOST_MAPPED_BYTES, _LEAST_MAPPED_BYTES, _MOST_TIMES = 64 << 20, 8 << 20, 128
"""What is read of files before they are mapped anew: so many times, and more often only beyond the first of these sizes."""
_OF_EXPERT = re.compile(r"\bexperts\.\d+\.")
_log = logging.getLogger(__name__)
_STORED = {
    torch.float32: ("F32", "F16", "BF16", "F64"),
    torch.bfloat16: ("F32", "F16", "BF16", "F64"),
    torch.float16: ("F32", "F16", "BF16", "F64"),
    torch.uint8: ("U8",),
}
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
_IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    *(f".{what}_scale" for what in ("input", "input_global", "activation", "output", "q", "k", "v")),
)
"""Suffixes that are not read: scales of activations (read only with weights that stay as they are stored), and of a quantised KV
cache."""


def whole(name: str, shape: tuple[int, ...]) -> Cut:
    """The `Shard` of a rank that holds everything."""
    del name
    return [[slice(0, size)] for size in shape]


def held_rows(shard: Shard, name: str, count: int) -> list[int]:
    """Which of `count` rows of a tensor `name` the shard holds."""
    return [row for run in shard(name, (count,))[0] for row in range(run.start, run.stop)]


class Checkpoint:
    """The safetensors files of a folder, single or sharded, or its GGUF file. `close` checks that everything was used."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = whole,
        quantisation: Quantisation | None = None,
        keeps: frozenset[Kind] = frozenset(),
        *,
        adapters: AdapterWeights | None = None,
        reads_matrices: bool = True,
    ) -> None:
        """`keeps` says what `matrix` leaves as it is stored (`Ops.keeps`). Without `reads_matrices` it returns
        `Unread` ones, but for those of experts: whoever packs them has them already."""
        self.adapters = no_adapters() if adapters is None else adapters
        self._folder, self.dtype, self.device, self._shard = folder, dtype, device, shard
        self._quantisation, self.keeps, self._reads_matrices = quantisation, keeps, reads_matrices
        self._files = {path: _open(path) for path in _files(folder)}
        places = {name: path for path, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        is_headless = "embed_tokens.weight" in places
        self._where = {
            decoders_name(name, is_headless=is_headless): (path, name) for name, path in places.items()
        }
        """The file of each tensor, and its name there, which may not be a decoder's."""
        self._notes = {
            decoders_name(name, is_headless=is_headless): note
            for file in self._files.values()
            for name, note in _notes(file).items()
        }
        whole_bytes = sum(path.stat().st_size for path in self._files)
        self._most_mapped_bytes = min(MOST_MAPPED_BYTES, max(_LEAST_MAPPED_BYTES, whole_bytes // _MOST_TIMES))
        self._unused = set(self._where)
        self._mapped_bytes, self._mapped_files = 0, set[Path]()
        """What was read of the files since they were mapped."""
        self.bytes_read = 0
        """Bytes of tensors, as they are in the files."""
        self._num_floats = 0
        """Matrices that are stored in fewer bits."""
        self._num_halves = 0
        """Matrices of a GGUF file that have 16 bits here."""

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part of the tensor, in `dtype` or the model's; `shape` is the whole tensor's.

        Raises UnsupportedModel when it is missing or has another shape."""
        wanted, cut = dtype or self.dtype, self._shard(name, shape)
        if (matrix := self._in_fewer_bits(name, shape)) is not None:
            self._num_floats += 1
            return matrix.floats(cut).to(self.device, wanted)
        stored = self._stored(name, shape)
        if stored not in _STORED[wanted]:
            raise UnsupportedModel(f"tensor {name!r} is stored as {stored}, which is not supported")
        return self.read(name, cut).to(self.device, wanted)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """Return the part as `take` does, but as it is stored where that is among `keeps`."""
        if not self._reads_matrices and not _OF_EXPERT.search(name):
            return self._unread(name, shape)
        packed = self._packed(name, shape)
        return self.take(name, shape, self._half(name)) if packed is None else on_device(packed, self.device)

    def _unread(self, name: str, shape: tuple[int, int]) -> Unread:
        self.ignore(name)
        rows, inputs = (sum(run.stop - run.start for run in runs) for runs in self._shard(name, shape))
        return Unread(torch.empty(rows, 0), inputs)

    def _half(self, name: str) -> torch.dtype | None:
        """Return the dtype of a matrix that stays in 16 bits; None for others."""
        if "half" not in self.keeps or name not in self._where:
            return None
        return _HALVES.get(self._slice(name).get_dtype())

    def _packed(self, name: str, shape: tuple[int, int]) -> Weight | None:
        if self._quantisation is None or not self.keeps - {"half"}:
            return None
        if self._quantisation.kind == "gguf":
            return self._from_gguf(name, shape)
        matrix = self._in_fewer_bits(name, shape)
        return None if matrix is None else matrix.kept(self._shard(name, shape), self.keeps)

    def _in_fewer_bits(self, name: str, shape: tuple[int, ...]) -> StoredMatrix | None:
        if self._quantisation is None or self._quantisation.kind == "gguf":
            return None
        matrix = find_matrix(self, self._quantisation, name, shape)
        if matrix is not None:
            self._unused.difference_update(parts_of(name))
        return matrix

    def _from_gguf(self, name: str, shape: tuple[int, int]) -> Weight | None:
        """K-quants and the like get 16 bits on CPUs, which have no kernel for them, where others keep what they have."""
        self._stored(name, shape)
        stored, cut = self._slice(name), self._shard(name, shape)
        assert isinstance(stored, GgufTensor)
        if stored.becomes_16_bits() and "int8_groups" in self.keeps:
            self._num_halves += 1
            return self.take(name, shape).half().to(self.dtype)
        if stored.type not in BLOCKS:
            return None
        packed = stored.packed(cut[0], divided(name, cut[1], shape[1], BLOCK), self.keeps)
        if packed is not None:
            self._count(name, sum(tensor.nbytes for tensor in tensors_of(packed)))
        return packed

    def _stored(self, name: str, shape: tuple[int, ...]) -> str:
        """Return safetensors' name of its dtype. Raises UnsupportedModel."""
        if name not in self._where:
            raise UnsupportedModel(f"the checkpoint in {self._folder} lacks the tensor {name!r}")
        require_shape(self, name, shape)
        return self._slice(name).get_dtype()

    def dtype_of(self, name: str) -> str | None:
        """Return safetensors' name of the dtype of a tensor; None where there is none."""
        return self._slice(name).get_dtype() if name in self._where else None

    def note(self, name: str) -> str | None:
        """Return what the header of a file says of a tensor."""
        return self._notes.get(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """Return the part of a tensor that `cut` says, or all of it, as it is stored."""
        path, stored = self._where[name]
        tensor = _read(self._slice(name), cut) if cut else self._files[path].get_tensor(stored)
        self._count(name, tensor.nbytes)
        return tensor

    def _slice(self, name: str) -> Any:
        path, stored = self._where[name]
        return self._files[path].get_slice(stored)

    def _count(self, name: str, num_bytes: int) -> None:
        """Count what was read. Tensors lie in a file's mapping, which goes when none does any more: where they are copied, or
        packed one after the other, this rank has little of the files in its memory."""
        self.bytes_read += num_bytes
        self._unused.discard(name)
        self._mapped_bytes += num_bytes
        self._mapped_files.add(self._where[name][0])
        if self._mapped_bytes > self._most_mapped_bytes:
            self._files |= {path: _mapped_anew(path, self._files[path]) for path in self._mapped_files}
            self._mapped_bytes, self._mapped_files = 0, set()
            give_back_freed()

    def held(self, name: str, count: int) -> list[int]:
        """Return which of `count` things that have tensors of their own this rank holds. The `Shard` is asked for rows of a
        tensor `name`, which need not exist."""
        return held_rows(self._shard, name, count)

    def ignore(self, *names: str) -> None:
        """Ignore tensors that are not this model's, or not this rank's."""
        self._unused.difference_update(names, *map(parts_of, names))

    def ignore_under(self, *prefixes: str) -> None:
        self._unused = {name for name in self._unused if not name.startswith(prefixes)}

    def close(self) -> None:
        """Close the files. Raises UnsupportedModel when a tensor was not read."""
        left = sorted(name for name in self._unused if not name.endswith(_IGNORED_SUFFIXES))
        if self.keeps - {"half"} and self._num_floats:
            _log.info(
                "%d matrices of few bits are floats here: no kernel reads them as they are stored",
                self._num_floats,
            )
        if self._num_halves:
            _log.info(
                "%d matrices of the GGUF file have 16 bits here: no kernel reads them as they are stored",
                self._num_halves,
            )
        self._files.clear()
        self._where.clear()
        give_back_freed()
        if left:
            raise UnsupportedModel(
                f"no rule says what to do with {len(left)} tensors of the checkpoint, e.g. {left[0]!r}"
            )


def _read(stored: Any, cut: Cut, chosen: tuple[slice, ...] = ()) -> Tensor:
    """Read a part. `stored` is safetensors' slice: indexing it reads just those bytes."""
    if len(chosen) == len(cut):
        return stored[chosen]
    parts = [_read(stored, cut, (*chosen, run)) for run in cut[len(chosen)]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, len(chosen))


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

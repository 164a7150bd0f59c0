"""Tensors of a GGUF file under the names that safetensors checkpoints have, floats or as they are stored."""

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import FourBit, Int8Groups, Kind
from models.files.gguf_reader import Gguf, library
from models.formats.gguf_blocks import BLOCK_TYPES, BlockType, matrix_of
from models.formats.gguf_names import EXPERTS, IGNORED, NAMES, Change, column_orders, of_each_kind, row_orders
from models.formats.stored_matrix import Cut


class GgufFile:
    """It is asked as safetensors' files are. Of a model in several files, it is asked for the first."""

    def __init__(self, path: Path) -> None:
        self._file = Gguf([path, *sorted(path.parent.glob(f"{path.stem}-*.gguf"))])
        self._tensors = _views(self._file)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "GgufTensor | MadeTensor":
        return self._tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        stored = self.get_slice(name)
        return stored[tuple(slice(0, size) for size in stored.get_shape())]

    def give_back(self) -> None:
        """Give the system what this process has of the file in its memory. What was read is copied, and what is read again comes
        again."""
        for numbers in self._file.mapped:
            mapped = numbers.base
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)


def _views(file: Gguf) -> "dict[str, GgufTensor | MadeTensor]":
    """Return what the file has, by the names here. Raises UnsupportedModel for a tensor that is not known."""
    names = NAMES[file.architecture]
    rows, columns = row_orders(file, names), column_orders(file, names)
    num_layers = int(file.need("block_count")) - int(file.get("nextn_predict_layers", 0))
    views = dict[str, GgufTensor | MadeTensor]()
    for stored, tensor in file.tensors.items():
        if stored in IGNORED:
            continue
        if (name := names.of(stored, num_layers)) is None:
            raise UnsupportedModel(f"{file.name} has a tensor {stored!r}, which is not supported")
        order, across = (
            next((order for end, order in orders.items() if name.endswith(end)), None)
            for orders in (rows, columns)
        )
        if EXPERTS in name:
            views |= _of_experts(name, tensor)
        elif (change := names.change(stored)) is not None:
            views[name] = _changed(tensor, change, order)
        else:
            views[name] = GgufTensor(tensor.tensor_type, tensor.data, _shape(tensor), order, across)
    return _made_of_others(views, file)


def _of_experts(name: str, tensor: Any) -> "dict[str, GgufTensor | MadeTensor]":
    """Return each expert's matrices. Gates and ups may be in one, gates first."""
    experts, rows, *inputs = _shape(tensor)
    if ".gate_up_proj." in name:
        parts = {
            name.replace("gate_up_proj", part): at * rows // 2
            for at, part in enumerate(("gate_proj", "up_proj"))
        }
        rows //= 2
    else:
        parts = {name: 0}
    return {
        part.replace(EXPERTS, str(expert)): GgufTensor(
            tensor.tensor_type, tensor.data[expert, first : first + rows], [rows, *inputs]
        )
        for part, first in parts.items()
        for expert in range(experts)
    }


def _changed(tensor: Any, change: Change, order: np.ndarray | None) -> "MadeTensor":
    shape = list(change(np.full(_shape(tensor), -1.0, np.float32)).shape)

    def make() -> np.ndarray:
        numbers = change(library().dequantize(tensor.data, tensor.tensor_type))
        return numbers if order is None else numbers[order]

    return MadeTensor(shape, make)


def _shape(tensor: Any) -> list[int]:
    return [int(size) for size in reversed(tensor.shape)]


class MadeTensor:
    """A tensor that is made of others as it is read, as float32."""

    def __init__(self, shape: list[int], make: Callable[[], np.ndarray]) -> None:
        self._shape, self._make = shape, make
        self.type = "F32"

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        return torch.from_numpy(np.array(self._make()[part], np.float32))


class GgufTensor:
    """One tensor, of which indexing reads a part, as float32."""

    def __init__(
        self,
        kind: Any,
        data: np.ndarray,
        shape: list[int],
        order: np.ndarray | None = None,
        across: np.ndarray | None = None,
    ) -> None:
        """`data`: rows of bytes, or of numbers; `order`: in which of them each row is; `across`: the same of columns."""
        self._kind, self._data, self._shape, self._order, self._across = kind, data, shape, order, across

    @property
    def type(self) -> str:
        return self._kind.name

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        floats = library().dequantize(self._rows(part[0]), self._kind)
        if self._across is not None:
            floats = floats[:, self._across]
        return torch.from_numpy(np.array(floats[(slice(None), *part[1:])], np.float32))

    def block_type(self, keeps: frozenset[Kind]) -> BlockType | None:
        """Return how the matrix is multiplied as it is stored, if `keeps` allows it."""
        kind = BLOCK_TYPES.get(self.type)
        return kind if kind is not None and kind.needs <= keeps else None

    def packed(self, kind: BlockType, cut: Cut) -> FourBit | Int8Groups | None:
        """Return this part, of whole groups, as it is stored; None where that cannot be."""
        rows, columns = cut
        if self._across is not None:
            columns = _runs(np.concatenate([self._across[run] for run in columns]))
            if any((run.stop - run.start) % kind.group or run.start % kind.group for run in columns):
                return None
        return matrix_of(kind, np.concatenate([self._rows(run) for run in rows]), columns)

    def _rows(self, run: slice) -> np.ndarray:
        return self._data[run if self._order is None else self._order[run]]

    def chosen(self, rows: np.ndarray) -> "GgufTensor":
        """Return a tensor of these rows."""
        return GgufTensor(self._kind, self._data, [len(rows), *self._shape[1:]], rows, self._across)


def _runs(places: np.ndarray) -> list[slice]:
    """Return the runs of neighbours."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    return [slice(int(run[0]), int(run[-1]) + 1) for run in np.split(places, ends)]


def _made_of_others(
    views: dict[str, GgufTensor | MadeTensor], file: Gguf
) -> dict[str, GgufTensor | MadeTensor]:
    """Return the tensors as checkpoints have them, where the file has their parts, or parts of several in one."""
    for name in [name for name in views if name.endswith("self_attn.k_b_proj.weight")]:
        keys, values = views.pop(name), views.pop(name.replace("k_b_proj", "v_b_proj"))
        heads, rank, nope = keys.get_shape()
        inner = values.get_shape()[1]
        views[name.replace("k_b_proj", "kv_b_proj")] = MadeTensor(
            [heads * (nope + inner), rank], partial(_keys_and_values, keys, values)
        )
    for name in [name for name in views if name.endswith("linear_attn.in_proj_ba.weight")]:
        if name.replace("in_proj_ba", "in_proj_qkv") in views:
            both = views.pop(name)
            assert isinstance(both, GgufTensor)
            views |= {
                name.replace("in_proj_ba", kind): both.chosen(rows)
                for kind, rows in of_each_kind(file).items()
            }
    return views


def _keys_and_values(keys: GgufTensor | MadeTensor, values: GgufTensor | MadeTensor) -> np.ndarray:
    """kv_b_proj, of which llama.cpp's files have each head's keys (rank, size), and its values (size, rank)."""
    up, down = (one[tuple(slice(0, size) for size in one.get_shape())].numpy() for one in (keys, values))
    return np.concatenate((up.swapaxes(1, 2), down), 1).reshape(-1, down.shape[-1])

"""A model's packed matrices in a file that processes share: kept as the model is loaded for the first time, and given back in the
same order whenever it is loaded again.

A model asks its operations to pack its matrices in an order of its own. So the file's n-th entry is the n-th answer."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from kernels.cpu.library import Isa
from kernels.cpu.linear import InPanels, Layout, Panels
from kernels.cpu.pages import taken_from
from kernels.cpu.prepacked import in_panels
from kernels.cpu.weights_file import DamagedFile, Entry, KeptArena, MappedFile, OpenFile, Piece
from kernels.ops import ExpertWeights, Ops
from kernels.packed import LinearWeight, LookUp, Prepacked, Weight
from kernels.table_rows import TableRows

_FIELDS: Final = tuple(field.name for field in fields(Panels) if field.name != "data")
_KINDS: Final[dict[str, Callable[[int], Any]]] = {
    "layout": Layout,
    "scales": Layout,
    "isa": Isa,
}
"""The types of `_FIELDS` that are no plain numbers."""


class MatrixRecorder:
    """Operations whose packed matrices are in memory that may become a file's."""

    def __init__(self, ops: Ops, arena: KeptArena) -> None:
        self._ops, self._arena = ops, arena
        self._entries: list[Entry] = []
        self._is_whole = True
        self.ops = replace(ops, pack=self._pack, look_up=self._look_up, pack_experts=self._pack_experts)

    @property
    def num_bytes(self) -> int:
        """The bytes of a file; 0 where one would lack a matrix."""
        return self._arena.num_bytes if self._is_whole else 0

    def write(self, file: OpenFile) -> None:
        """Have the file take the place of the memory. Raises OSError."""
        self._arena.become(file, self._entries)

    def _pack(self, weight: Weight, dtype: torch.dtype) -> LinearWeight:
        with taken_from(self._arena):
            made = self._ops.pack(weight, dtype)
        match made:
            case InPanels():
                return in_panels(self._keep_panels(made.panels))
            case Tensor():
                return self._keep_tensor(made)
            case _:
                self._is_whole = False
                return made

    def _look_up(self, weight: Weight, dtype: torch.dtype, head: LinearWeight | None) -> LookUp:
        with taken_from(self._arena):
            made = self._ops.look_up(weight, dtype, head)
        owner = made if isinstance(made, TableRows) else getattr(made, "__self__", None)
        if isinstance(head, Prepacked) and head.rows is not None:
            return made
        match owner:
            case Panels():
                return self._keep_panels(owner).rows
            case TableRows():
                return TableRows(self._keep_tensor(owner.table))
            case _:
                self._is_whole = False
                return made

    def _pack_experts(self, held: ExpertWeights) -> ExpertWeights:
        """Experts may move to another rank, so they are this process's own."""
        return self._ops.pack_experts(held)

    def _keep_panels(self, panels: Panels) -> Panels:
        data, piece = self._kept(panels.data)
        self._entries.append({name: int(getattr(panels, name)) for name in _FIELDS} | {"piece": piece})
        return replace(panels, data=data)

    def _keep_tensor(self, tensor: Tensor) -> Tensor:
        data, piece = self._kept(tensor)
        name = str(tensor.dtype).removeprefix("torch.")
        self._entries.append({"dtype": name, "shape": list(tensor.shape), "piece": piece})
        return data.view(tensor.dtype).view(tensor.shape)

    def _kept(self, tensor: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Return the content in the arena, and where."""
        data = tensor
        if (piece := self._arena.kept(tensor)) is None:
            data = self._arena.copied(tensor)
            piece = self._arena.kept(data)
        assert piece is not None, "it was taken from the arena"
        return data, (piece.mapping, piece.at, piece.num_bytes)


class MatrixReader:
    """Operations that give a file's matrices back. What they are asked to pack says only its shape."""

    def __init__(self, ops: Ops, file: MappedFile) -> None:
        self._file, self._entries = file, iter(file.entries)
        self.ops = replace(ops, pack=self._pack, look_up=self._look_up)

    def finish(self) -> None:
        """Raises DamagedFile where the model has asked for fewer matrices than the file has."""
        if next(self._entries, None) is not None:
            raise DamagedFile("it has matrices that the model does not ask for")

    def _pack(self, weight: Weight, dtype: torch.dtype) -> LinearWeight:
        del dtype
        found = self._next(weight)
        return in_panels(found) if isinstance(found, Panels) else found

    def _look_up(self, weight: Weight, dtype: torch.dtype, head: LinearWeight | None) -> LookUp:
        del dtype
        if isinstance(head, Prepacked) and head.rows is not None:
            return head.rows
        found = self._next(weight)
        return found.rows if isinstance(found, Panels) else TableRows(found)

    def _next(self, weight: Weight) -> Panels | Tensor:
        """Return the next matrix. Raises DamagedFile where it has another shape."""
        entry = next(self._entries, None)
        if entry is None:
            raise DamagedFile("it lacks matrices that the model asks for")
        data = self._file.tensor(Piece(*entry["piece"]))
        if "dtype" in entry:
            made: Panels | Tensor = data.view(getattr(torch, entry["dtype"])).view(entry["shape"])
        else:
            made = Panels(data=data, **{name: _KINDS.get(name, int)(entry[name]) for name in _FIELDS})
        if tuple(made.shape) != tuple(weight.shape):
            raise DamagedFile(
                f"it has a matrix {tuple(made.shape)} where the model asks for {tuple(weight.shape)}"
            )
        return made

"""A matrix in fewer bits, and the tensors of a checkpoint that it consists of."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import Kind, Weight

Cut = Sequence[Sequence[slice]]
"""For each dimension of a tensor the runs that a rank holds, joined in this order. All have a start and a stop, and no step."""


class StoredTensors(Protocol):
    """A checkpoint's tensors by name, as they are in its files."""

    def dtype_of(self, name: str) -> str | None:
        """Return safetensors' name of its dtype; None where there is no such tensor."""
        ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def note(self, name: str) -> str | None:
        """Return what the header of a file says of a tensor, whether it is there or not."""
        ...

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """Return the part that `cut` says, or all of it."""
        ...


class StoredMatrix(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def fits(self) -> bool:
        """Whether its tensors have the shapes that the checkpoint's configuration says."""
        ...

    def floats(self, cut: Cut) -> Tensor:
        """Return the part's numbers in float32."""
        ...

    def kept(self, cut: Cut, keeps: frozenset[Kind]) -> Weight | None:
        """Return the part in one of the kinds `keeps`, which loses nothing; None where none is possible. Raises UnsupportedModel
        where the cut falls inside a group that shares a scale."""
        ...


def require_shape(
    tensors: StoredTensors, name: str, shape: tuple[int, ...] | None, *, times: int = 1
) -> tuple[int, ...]:
    """Return the shape of a matrix whose tensor packs `times` numbers of a row into each element. Raises UnsupportedModel where
    `shape` is given and differs."""
    *outer, last = tensors.shape_of(name)
    return fitting(name, (*outer, last * times), shape)


def fitting(name: str, stored: Sequence[int], shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape `stored`. Raises UnsupportedModel where it is another than `shape`."""
    found = tuple(map(int, stored))
    if found != (found if shape is None else shape):
        raise UnsupportedModel(f"tensor {name!r} is {found}; config.json says {shape}")
    return found

"""Runs transformers' code over tensors that have shapes and no values, so that no weight is read and nothing is multiplied."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_META: Final = torch.device("meta")
_ATEN: Final = torch.ops.aten


class _NoValues(TorchDispatchMode):
    """Answers what asks for a value: zero, false, or no rows, as though nobody had chosen an expert."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        told = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.is_meta and func in _ANSWERS:
            return _ANSWERS[func](*args, **told)
        if func in (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default):
            args = (first, [one for part in args[1] for one in _numbers(part)], *args[2:])
        return func(*args, **told)


def _copy(tensor: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **others: Any) -> Tensor:
    if device is not None and torch.device(device).type != "meta":
        return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device=device)
    return _ATEN._to_copy.default(tensor, dtype=dtype, device=device, **others)


def _split(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Return rows of sizes that are unknown, and so 0."""
    if sum(sizes) == tensor.shape[dim]:
        return _ATEN.split_with_sizes.default(tensor, sizes, dim)
    return [tensor.narrow(dim, 0, size) for size in sizes]


_ANSWERS: Final[Mapping[Any, Callable[..., Any]]] = {
    _ATEN._local_scalar_dense.default: lambda tensor: torch.zeros((), dtype=tensor.dtype).item(),
    _ATEN.equal.default: lambda *_: True,
    _ATEN.nonzero.default: lambda tensor: tensor.new_empty((0, tensor.ndim), dtype=torch.int64),
    _ATEN._to_copy.default: _copy,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.index_add.default: lambda tensor, *_, **__: tensor.new_empty(tensor.shape),
    _ATEN.index_add_.default: lambda tensor, *_, **__: tensor,
}


def _numbers(index: Any) -> list[Any]:
    """Return the rows that a mask of unknown values chooses, none, for each of its dimensions; what is no mask, as it is."""
    if isinstance(index, Tensor) and index.is_meta and index.dtype == torch.bool:
        return [index.new_empty((0,), dtype=torch.int64)] * index.ndim
    return [index]


@contextmanager
def without_values() -> Generator[None]:
    """Make whatever is computed within tensors without values."""
    with torch.no_grad(), _META, _NoValues():
        yield

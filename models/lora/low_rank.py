"""What adapters add to the products with a model's matrices: scale * B (A x), for the rows that have the adapter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.ops import Rows
from kernels.packed import LinearWeight
from kernels.rounding import Activations, as_floats
from models.lora.adapter import Adapter, open_adapter
from models.quantised import indices

Linear = Callable[[Activations, LinearWeight, Tensor | None], Tensor]
"""`Ops.linear`"""
Shard = Callable[[str, tuple[int, ...]], Sequence[Sequence[slice]]]
"""`models.weights.Shard`"""


@dataclass(frozen=True, slots=True)
class _Up:
    """One module's B, times its scale."""

    weight: Tensor
    """(outputs, rank)"""
    ranks: slice
    """Which of the columns behind all A it takes."""
    outputs: slice
    """Which of the joined matrix' outputs it adds to."""


@dataclass(frozen=True, slots=True)
class _Beside:
    """One adapter's matrices beside one matrix of the model."""

    down: Tensor
    """(ranks, inputs): A of all modules."""
    ups: tuple[_Up, ...]


class LowRank:
    """All adapters beside one matrix, which may be several modules' joined."""

    def __init__(self, beside: Mapping[str, _Beside]) -> None:
        """`beside`: by the adapter's key."""
        self._beside = beside

    def add(self, out: Tensor, x: Activations, rows: Mapping[str, Rows], linear: Linear) -> None:
        """Add to `out` (T, outputs) in place. `x` (T, inputs) is what was multiplied with the matrix."""
        if not rows or not self._beside:
            return
        x = as_floats(x)
        for key, chosen in rows.items():
            if (beside := self._beside.get(key)) is None:
                continue
            low = linear(x[chosen], beside.down, None)
            for up in beside.ups:
                added = linear(low[:, up.ranks], up.weight, None)
                if isinstance(chosen, slice):
                    out[chosen, up.outputs].add_(added)
                else:
                    out[:, up.outputs].index_add_(0, chosen, added)

    def reordered(self, order: Tensor) -> "LowRank":
        """Return it for a matrix whose outputs are put in another order, within each of its modules."""
        return LowRank(
            {
                key: replace(beside, ups=tuple(_reordered(up, order) for up in beside.ups))
                for key, beside in self._beside.items()
            }
        )


NONE_BESIDE = LowRank({})


def _reordered(up: _Up, order: Tensor) -> _Up:
    return replace(up, weight=_by_columns(up.weight[order[up.outputs] - up.outputs.start]))


def _by_columns(weight: Tensor) -> Tensor:
    """Return a matrix of few columns with each of them in one piece: of few rows a CPU multiplies it in half of the time."""
    return weight.t().contiguous().t()


class AdapterWeights:
    """Reads adapters' matrices, and only the part of each that a rank holds: A is cut as the inputs of the module's own matrix
    are, B as its outputs."""

    def __init__(
        self,
        adapters: Sequence[Adapter],
        shard: Shard,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self._adapters, self._shard, self._dtype, self._device = adapters, shard, dtype, device

    def __bool__(self) -> bool:
        return bool(self._adapters)

    def beside(self, modules: Mapping[str, tuple[int, int]]) -> LowRank:
        """Return what adapters have beside the joined matrix of `modules`, by their names in the checkpoint; each has so many
        outputs and inputs."""
        adapters = [adapter for adapter in self._adapters if adapter.pairs.keys() & modules.keys()]
        if not adapters:
            return NONE_BESIDE
        cuts = {name: indices(self._shard(f"{name}.weight", shape)) for name, shape in modules.items()}
        return LowRank({adapter.key: self._read(adapter, cuts) for adapter in adapters})

    def _read(self, adapter: Adapter, cuts: Mapping[str, Sequence[Tensor]]) -> _Beside:
        downs: list[Tensor] = []
        ups: list[_Up] = []
        start = num_ranks = 0
        with open_adapter(adapter.key, adapter.file) as file:
            for module, (rows, columns) in cuts.items():
                outputs, start = slice(start, start + len(rows)), start + len(rows)
                if (pair := adapter.pairs.get(module)) is None:
                    continue
                ranks, num_ranks = slice(num_ranks, num_ranks + pair.rank), num_ranks + pair.rank
                downs.append(self._here(file.get_tensor(pair.a)[:, columns]))
                up = self._here(file.get_tensor(pair.b)[rows].float() * pair.scale)
                ups.append(_Up(_by_columns(up), ranks, outputs))
        return _Beside(torch.cat(downs), tuple(ups))

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)


NO_ADAPTERS = AdapterWeights((), lambda _, shape: [[slice(0, size)] for size in shape])

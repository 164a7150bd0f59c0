"""What adapters add to the products with a model's matrices: scale * B (A x), for the rows that have the adapter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ops import Rows
from kernels.packed import LinearWeight
from kernels.rounding import Activations, as_floats
from models.files.cuts import indices
from models.lora.adapter import Adapter, open_adapter

Linear = Callable[[Activations, LinearWeight, Tensor | None], Tensor]
"""`Ops.linear`"""
Shard = Callable[[str, tuple[int, ...]], Sequence[Sequence[slice]]]
"""`models.formats.checkpoint.Shard`"""


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
    """All adapters beside one matrix, which may be several modules' joined. Adapters may come and go while it adds on another
    thread, if no step has rows of those that go."""

    def __init__(self) -> None:
        self._beside: dict[str, _Beside] = {}
        """By the adapter's key."""

    def hold(self, key: str, beside: _Beside) -> None:
        self._beside[key] = beside

    def drop(self, key: str) -> None:
        self._beside.pop(key, None)

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


def _by_columns(weight: Tensor) -> Tensor:
    """Return a matrix of few columns with each of them in one piece: of few rows a CPU multiplies it in half of the time."""
    return weight.t().contiguous().t()


@dataclass(frozen=True, slots=True)
class _Place:
    """A matrix beside which adapters may lie."""

    low_rank: LowRank
    modules: Mapping[str, tuple[int, int]]
    order: Tensor | None


class AdapterWeights:
    """Adapters' matrices beside a rank's part of a model: A is cut as the inputs of the module's own matrix are, B as its
    outputs."""

    def __init__(
        self,
        adapters: Sequence[Adapter],
        shard: Shard,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self._shard, self._dtype, self._device = shard, dtype, device
        self._adapters = {adapter.key: adapter for adapter in adapters}
        self._places: list[_Place] = []

    def __contains__(self, key: str) -> bool:
        return key in self._adapters

    def __bool__(self) -> bool:
        return bool(self._adapters)

    def beside(self, modules: Mapping[str, tuple[int, int]], order: Tensor | None = None) -> LowRank:
        """Return what adapters have beside the joined matrix of `modules`, by their names in the checkpoint; each has so many
        outputs and inputs. `order` is that of the matrix' outputs where they were put in another one, within each module."""
        place = _Place(LowRank(), modules, order)
        self._places.append(place)
        for adapter in self._adapters.values():
            if (found := self._read(adapter, place)) is not None:
                place.low_rank.hold(adapter.key, found)
        return place.low_rank

    @torch.inference_mode()
    def load(self, adapter: Adapter) -> None:
        """Have one more adapter, or leave everything as it is. Raises ConfigError."""
        found = [(place.low_rank, self._read(adapter, place)) for place in self._places]
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies are on another thread's stream
        for low_rank, beside in found:
            if beside is not None:
                low_rank.hold(adapter.key, beside)
        self._adapters[adapter.key] = adapter

    def drop(self, key: str) -> None:
        """Give an adapter's memory back. Nothing may compute with it any more."""
        for place in self._places:
            place.low_rank.drop(key)
        self._adapters.pop(key, None)

    def _read(self, adapter: Adapter, place: _Place) -> _Beside | None:
        if not adapter.pairs.keys() & place.modules.keys():
            return None
        cuts = {name: indices(self._shard(f"{name}.weight", shape)) for name, shape in place.modules.items()}
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
                if place.order is not None:
                    up = up[place.order[outputs] - outputs.start]
                ups.append(_Up(_by_columns(up), ranks, outputs))
        return _Beside(torch.cat(downs), tuple(ups))

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype)


def no_adapters() -> AdapterWeights:
    return AdapterWeights((), lambda _, shape: [[slice(0, size)] for size in shape])

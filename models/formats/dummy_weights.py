"""Random weights of a model of which only config.json is there: a step costs what it costs, and its tokens mean nothing."""

from zlib import crc32

import torch
from torch import Tensor

from kernels.packed import Kind, Weight, on_device
from models.formats.checkpoint import Shard, held_rows, whole
from models.formats.rounded_matrix import WeightRounding, round_part
from models.lora.low_rank import AdapterWeights, no_adapters
from models.spec.model_spec import ModelSpec


class DummyWeights:
    """models.formats.weight_source.WeightSource. Ranks that hold the same tensor whole get the same numbers."""

    keeps: frozenset[Kind] = frozenset()
    bytes_read = 0

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = whole,
        matrices: torch.dtype | None = None,
        *,
        adapters: AdapterWeights | None = None,
        rounds: WeightRounding | None = None,
        kept: frozenset[Kind] = frozenset(),
    ) -> None:
        """`matrices`: what they would be stored in and are kept in; None: `dtype`. `rounds`: what they are rounded to, as
        `kept` says."""
        self.rounds, self._kept = rounds, kept if rounds is None else rounds.kept(kept)
        self.adapters = no_adapters() if adapters is None else adapters
        self.dtype, self.device, self._shard, self._matrices = dtype, device, shard, matrices

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        kept: frozenset[Kind],
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = whole,
        *,
        adapters: AdapterWeights | None = None,
        rounds: WeightRounding | None = None,
    ) -> "DummyWeights":
        """With matrices in the bits in which those of a checkpoint would stay. `kept` is `Ops.keeps`."""
        halves = "half" in kept and spec.dtype in ("bfloat16", "float16")
        stored = getattr(torch, spec.dtype) if halves else None
        return cls(dtype, device, shard, stored, adapters=adapters, rounds=rounds, kept=kept)

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Matrices keep the size of what they multiply; vectors, which are norms and biases, lie between 0 and 0.1 around 1."""
        part = [sum(run.stop - run.start for run in runs) for runs in self._shard(name, shape)]
        generator = torch.Generator(self.device).manual_seed(crc32(name.encode()))
        out = torch.empty(part, dtype=dtype or self.dtype, device=self.device)
        if not out.is_floating_point():  # a table of numbers of experts: different ones in each row
            return out.copy_(torch.arange(part[-1], device=self.device).expand(part))
        if len(shape) == 1:
            return out.uniform_(0.95, 1.05, generator=generator)
        bound = (3 / shape[-1]) ** 0.5
        return out.uniform_(-bound, bound, generator=generator)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        to = None if self.rounds is None else self.rounds.of_matrix(name)
        return self._rounded(to, name, self.take(name, shape, self._matrices))

    def table(self, name: str, shape: tuple[int, int]) -> Weight:
        to = None if self.rounds is None else self.rounds.of_tables.of_matrix(name)
        return self._rounded(to, name, self.take(name, shape, self._matrices))

    def each_expert(
        self, name: str, shape: tuple[int, int, int], *, transposed: bool = False
    ) -> list[Weight] | None:
        if self.rounds is None:
            return None
        held = self.take(name, shape, self._matrices)
        each = (held.mT if transposed else held).contiguous()
        return [self._rounded(self.rounds, name, matrix) for matrix in each]

    def _rounded(self, to: WeightRounding | None, name: str, part: Tensor) -> Weight:
        """Round this rank's part alone: its numbers mean nothing."""
        if to is None or not to.takes(part.shape):
            return part
        made = round_part(to, name, part, [slice(0, part.shape[1])], self._kept)
        return made.to(self.device, self.dtype) if isinstance(made, Tensor) else on_device(made, self.device)

    def held(self, name: str, count: int) -> list[int]:
        return held_rows(self._shard, name, count)

    def ignore(self, *names: str) -> None:
        """There are no other tensors."""

    ignore_under = ignore

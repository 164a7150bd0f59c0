"""Ranks as threads: each holds a part of a model, and they meet in `Collectives` at a barrier."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch

from kernels.collectives import ONE_RANK, Collectives, LocalExperts
from kernels.packed import LookUp
from models.formats.stored_matrix import Cut
from tests.patience import PATIENCE_S

T = TypeVar("T")
ROWS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "w1",
    "w3",
    "embed_tokens",
    "lm_head",
    "sinks",
    "_b_proj",
)
COLUMNS = ("o_proj.weight", "down_proj.weight", "w2.weight")


def tensor_parallel(rank: int, size: int, by_turns: bool = False) -> Callable[[str, tuple[int, ...]], Cut]:
    """Rows of what widens, columns of what narrows again; the rest whole."""

    def shard(name: str, shape: tuple[int, ...]) -> Cut:
        cut = [[slice(0, n)] for n in shape]
        if by_turns and ".experts." in name:
            dim = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1}.get(name.rpartition(".")[2])
            if dim is not None:  # gates and ups stay pairs
                unit = 2 if "gate_up" in name else 1
                n = shape[dim] // unit // size * unit
                cut[dim] = [slice(rank * n, (rank + 1) * n)]
            return cut
        if name.endswith("experts.gate_up_proj"):
            half, n = shape[1] // 2, shape[1] // 2 // size
            cut[1] = [slice(at + rank * n, at + (rank + 1) * n) for at in (0, half)]
            return cut
        if name.endswith("experts.down_proj"):
            cut[2] = [slice(rank * shape[2] // size, (rank + 1) * shape[2] // size)]
            return cut
        dim = 1 if name.endswith(COLUMNS) else 0 if any(part in name for part in ROWS) else None
        if dim is not None:
            cut[dim] = [slice(rank * shape[dim] // size, (rank + 1) * shape[dim] // size)]
        return cut

    return shard


def expert_parallel(held: list[range]) -> Callable[[str, tuple[int, ...]], Cut]:
    """The experts of these runs, in either spelling; everything else whole."""

    def shard(name: str, shape: tuple[int, ...]) -> Cut:
        cut = [[slice(0, n)] for n in shape]
        stacked = ".experts." in name and not name.endswith(("weight", "down_proj_bias"))
        if stacked or name.endswith("experts"):
            cut[0] = [slice(run.start, run.stop) for run in held]
        return cut

    return shard


class Meeting:
    """What the ranks of one group say to each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self._said: list[torch.Tensor] = [torch.empty(0)] * size

    def all(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._said[rank] = x
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said

    def collectives(self, rank: int, vocab_size: int) -> Collectives:
        """Tensor parallel. Each rank has as many rows of the embedding."""
        share = vocab_size // len(self._said)

        def sum_partial(x: torch.Tensor) -> torch.Tensor:
            return torch.stack(self.all(rank, x)).sum(0)

        def embed(tokens: torch.Tensor, rows: LookUp, dtype: torch.dtype) -> torch.Tensor:
            local = tokens - rank * share
            mine = (local >= 0) & (local < share)
            return sum_partial(rows(local.where(mine, 0)).to(dtype) * mine[:, None])

        def experts(
            layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, local: LocalExperts
        ) -> torch.Tensor:
            return sum_partial(local(x, ids, weights))

        def part(size: int) -> slice:
            return slice(rank * size // len(self._said), (rank + 1) * size // len(self._said))

        return Collectives(sum_partial, embed, lambda x: torch.cat(self.all(rank, x), -1), experts, part)

    def expert_joins(self, rank: int, held: list[range]) -> Collectives:
        """Expert parallel, all tokens everywhere. An expert that several ranks hold is computed by the first."""
        placement = self.all(rank, torch.tensor([i for run in held for i in run]))

        def experts(
            layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, local: LocalExperts
        ) -> torch.Tensor:
            taken = torch.cat((torch.empty(0, dtype=torch.int64), *placement[:rank]))
            slots = torch.full_like(ids, -1)
            for slot, expert in enumerate(placement[rank].tolist()):
                if not (taken == expert).any():
                    slots[ids == expert] = slot
            return torch.stack(self.all(rank, local(x, slots, weights))).sum(0)

        return replace(ONE_RANK, experts=experts)

    def run(self, work: Callable[[int], T]) -> list[T]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))

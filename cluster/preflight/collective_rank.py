"""One rank of the collective check, as a process of its own (`rank_job.py`): all-reduce and all-to-all on known numbers, and a
message from every rank to every other, timed."""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.preflight.rank_job import meet, read_job

_ROUNDS = 5
_STEP = timedelta(seconds=60)


def measure(rank: int, world: int, num_bytes: int, device: torch.device) -> dict[str, object]:
    """Measure. Bus bandwidths are as nccl-tests defines them: 2 (n - 1) / n x bytes / time for an all-reduce, and half of
    that for an all-to-all. `links` are this rank's sends, by receiver."""
    length = num_bytes // 4 // world * world
    mine, theirs = torch.empty(length, device=device), torch.empty(length, device=device)

    def is_sum() -> bool:
        return bool((mine == world * (world + 1) / 2).all())

    def is_swapped() -> bool:
        sent = torch.arange(1.0, world + 1, device=device).repeat_interleave(length // world)
        return bool((theirs == sent).all())

    sums = _timed(rank, mine, lambda: dist.all_reduce(mine), is_sum)
    swaps = _timed(rank, mine, lambda: dist.all_to_all_single(theirs, mine), is_swapped)
    return {
        "rank": rank,
        "all-reduce": sums.judged(2 * (world - 1) / world * num_bytes),
        "all-to-all": swaps.judged((world - 1) / world * num_bytes),
        "links": _links(rank, world, mine, num_bytes, device),
    }


class _Timed(NamedTuple):
    """The best of several rounds, and whether each of them moved the right numbers."""

    correct: bool
    best_s: float

    def judged(self, num_bytes: float) -> dict[str, object]:
        return {"correct": self.correct, "bus_bytes_per_s": num_bytes / self.best_s}


def _timed(rank: int, numbers: Tensor, run: Callable[[], object], is_right: Callable[[], bool]) -> _Timed:
    correct, best_s = True, float("inf")
    for _ in range(_ROUNDS):
        numbers.fill_(float(rank + 1))
        dist.barrier()
        started = time.perf_counter()
        run()
        _finish(numbers.device)
        best_s = min(best_s, time.perf_counter() - started)
        correct = correct and is_right()
    return _Timed(correct, best_s)


def _links(rank: int, world: int, numbers: Tensor, num_bytes: int, device: torch.device) -> dict[int, float]:
    """Measure one pair at a time, so that no link is measured through another's traffic."""
    sent: dict[int, float] = {}
    answer = torch.zeros(1, device=device)
    for source in range(world):
        for target in range(world):
            if source == target:
                continue
            dist.barrier()
            if rank == source:
                best_s = float("inf")
                for _ in range(_ROUNDS):
                    started = time.perf_counter()
                    dist.send(numbers, target)
                    dist.recv(answer, target)
                    _finish(device)
                    best_s = min(best_s, time.perf_counter() - started)
                sent[target] = num_bytes / best_s
            elif rank == target:
                for _ in range(_ROUNDS):
                    dist.recv(numbers, source)
                    dist.send(answer, source)
    return sent


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    job = read_job()
    device = torch.device("cpu")
    if job.backend == "nccl":
        device = torch.device("cuda", job.card % torch.cuda.device_count())
        torch.cuda.set_device(device)  # where barriers meet, which are given no tensor
    store = meet(job)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world, timeout=_STEP)
    try:
        mine = measure(job.rank, job.world, job.mib << 20, device)
        dist.barrier()  # the store ends with its process: rank 0 leaves last
        sys.stdout.write(json.dumps(mine) + "\n")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of the collective check, as a process of its own: `python -m cluster.preflight.rank RANK WORLD HOST:PORT BACKEND MIB`.

All-reduce on known numbers, and a message from every rank to every other, timed. One JSON line on standard output."""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_ROUNDS = 5
_TIMEOUT = timedelta(seconds=60)


def measure(rank: int, world: int, num_bytes: int, device: torch.device) -> dict[str, object]:
    """`bus_bytes_per_s` as nccl-tests defines it: 2 (n - 1) / n x bytes / time. `links`: this rank's sends, by receiver."""
    numbers = torch.full((num_bytes // 4,), float(rank + 1), device=device)
    correct, best_s = True, float("inf")
    for _ in range(_ROUNDS):
        numbers.fill_(float(rank + 1))
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(numbers)
        _finish(device)
        best_s = min(best_s, time.perf_counter() - started)
        correct = correct and bool((numbers == world * (world + 1) / 2).all())
    return {
        "rank": rank,
        "correct": correct,
        "bus_bytes_per_s": 2 * (world - 1) / world * num_bytes / best_s,
        "links": _links(rank, world, numbers, num_bytes, device),
    }


def _links(
    rank: int, world: int, numbers: torch.Tensor, num_bytes: int, device: torch.device
) -> dict[int, float]:
    """One pair at a time, so that no link is measured through another's traffic."""
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
    rank, world, address, backend, mib = sys.argv[1:6]
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend, init_method=f"tcp://{address}", rank=int(rank), world_size=int(world), timeout=_TIMEOUT
    )
    try:
        sys.stdout.write(json.dumps(measure(int(rank), int(world), int(mib) << 20, device)) + "\n")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

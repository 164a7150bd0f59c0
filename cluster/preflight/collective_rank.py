"""One rank of the collective check, as a process of its own:
`python -m cluster.preflight.collective_rank RANK WORLD HOST:PORT BACKEND MIB WAIT_S`.

All-reduce on known numbers, and a message from every rank to every other, timed. One JSON line on standard output: what every
rank has measured, in their order, so that each of them can judge the whole. The others may come as late as WAIT_S."""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

_ROUNDS = 5
_STEP = timedelta(seconds=60)


def measure(rank: int, world: int, num_bytes: int, device: torch.device) -> dict[str, object]:
    """Measure. `bus_bytes_per_s` is as nccl-tests defines it: 2 (n - 1) / n x bytes / time. `links` are this rank's sends, by
    receiver."""
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
    rank, world, address, backend, mib, wait_s = sys.argv[1:7]
    host, _, port = address.rpartition(":")
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    wait = timedelta(seconds=float(wait_s))
    store = TCPStore(host, int(port), int(world), is_master=rank == "0", timeout=wait)
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(world), timeout=_STEP)
    try:
        mine = measure(int(rank), int(world), int(mib) << 20, device)
        store.set(f"measured/{rank}", json.dumps(mine))
        everyone = [json.loads(store.get(f"measured/{other}")) for other in range(int(world))]
        dist.barrier()  # the store ends with its process: rank 0 leaves last
        sys.stdout.write(json.dumps(everyone) + "\n")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

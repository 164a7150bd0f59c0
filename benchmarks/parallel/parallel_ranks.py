"""What ranks cost each other on CPUs over gloo, and what each reads and holds.

    python -m benchmarks.parallel.parallel_ranks [--json FILE]

Collectives: one layer's all-reduce (tp 2) and all-to-all (ep 2) of T rows of 2048 float32. Pipeline: the share of a prompt's time
that the last of two stages waits, by the number of micro-batches, with stages that sleep 20 ms for a whole chunk in place of
computing. Loading: 150 MB of Llama in float32, real ranks.

Predictions: an all-reduce of 64 rows (0.5 MB) 2 ms; waiting 1 / (m + 1) of the time for m micro-batches, less with the next step
behind; a rank of tp 2 or pp 2 reads 50 % of what one rank does."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from benchmarks.parallel.rank_processes import on_ranks
from benchmarks.report import parser, write
from cluster.instance.shared_memory import take_memory
from core.config.cluster_config import EngineConfig, ModelConfig
from engine.ranks.child_ranks import start_children
from engine.ranks.rank import start_all
from engine.ranks.rank_messages import Meeting, MemoryPlace
from engine.ranks.start_ranks import setups_of
from engine.sizing.pool_size import size_pool
from parallel.comm import Comm, connect
from parallel.mesh import Mesh

HIDDEN, ROWS, ROUNDS = 2048, (1, 64, 512), 60
STAGE_S, STEPS = 0.02, 12
CPU = torch.device("cpu")


def collectives(num_rounds: int, rank: int, path: str) -> dict[str, float]:
    """p50 of a call in ms, by kind and rows; kinds interleaved."""
    comm = connect(dist.FileStore(path), "bench", (0, 1), rank, backend="gloo", device=CPU)  # pyright: ignore[reportPrivateImportUsage]
    found: dict[str, list[float]] = {}
    for _ in range(num_rounds):
        for rows in ROWS:
            x, half = torch.ones(rows, HIDDEN), [rows - rows // 2, rows // 2]
            received = [half[rank]] * 2
            kinds: dict[str, Callable[[], Any]] = {
                "all_reduce": lambda x=x: comm.all_reduce(x),
                "all_to_all": lambda x=x, half=half, received=received: comm.all_to_all(x, half, received),
            }
            for kind, call in kinds.items():
                started = time.perf_counter()
                call()
                found.setdefault(f"{kind}, {rows} rows", []).append(time.perf_counter() - started)
    comm.close()
    return {name: 1e3 * statistics.median(times) for name, times in found.items()}


def pipeline(num_steps: int, rank: int, path: str) -> dict[str, float]:
    """The share of its time that this stage of two waits for the other, by micro-batches in a step."""
    comm = connect(dist.FileStore(path), "stages", (0, 1), rank, backend="gloo", device=CPU)  # pyright: ignore[reportPrivateImportUsage]
    found: dict[str, float] = {}
    for linked in (True, False):
        for num_parts in (1, 2, 4, 8):
            name = f"{num_parts} micro-batches, steps {'wait for tokens' if linked else 'one ahead'}"
            found[name] = _waiting_share(comm, num_parts, linked, num_steps)
    comm.close()
    return found


def _waiting_share(comm: Comm, num_parts: int, linked: bool, num_steps: int) -> float:
    """`linked`: no step begins before the last one's token is sampled, as when one prompt's or batch's steps follow each
    other."""
    waited_s, started = 0.0, time.perf_counter()
    for _ in range(num_steps):
        for _ in range(num_parts):
            if comm.rank == 1:
                begun = time.perf_counter()
                comm.recv((64, HIDDEN), torch.float32, 0)
                waited_s += time.perf_counter() - begun
            time.sleep(STAGE_S / num_parts)
            if comm.rank == 0:
                comm.send(torch.ones(64, HIDDEN), 1)
        if linked and comm.rank == 0:
            comm.recv((1,), torch.int64, 1)
        elif linked:
            comm.send(torch.ones(1, dtype=torch.int64), 0)
    return waited_s / (time.perf_counter() - started)


def loading(folder: Path, meshes: Sequence[Mesh]) -> dict[str, dict[str, float]]:
    """The largest figures of a mesh's ranks: bytes read, seconds to load, resident memory at the most."""
    found: dict[str, dict[str, float]] = {}
    for mesh in meshes:
        engine = EngineConfig(kv_bytes=8 << 20)
        size = size_pool(folder, ModelConfig(path=str(folder)), engine, mesh)
        memory, path = take_memory(size.num_bytes)
        with tempfile.TemporaryDirectory() as store:
            devices = ["cpu"] * mesh.size
            setups = setups_of(
                folder, engine, size, mesh, memories=[MemoryPlace(size.num_bytes, path)], devices=devices
            )
            met = [replace(setup, meeting=Meeting(f"{store}/store")) for setup in setups]
            ranks, ready = start_all(start_children, met, 300)
            for rank in ranks:
                rank.end()
        del memory
        found[str(mesh)] = {
            "MB read": max(r.start.bytes_read for r in ready) / 1e6,
            "load s": max(r.start.whole_s for r in ready),
            "peak MB": max(r.peak_bytes for r in ready) / 1e6,
        }
    return found


def checkpoint(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


def main() -> None:
    args = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(Path(folder))
        loads = loading(
            Path(folder), (Mesh(), Mesh(tp=2)) if args.smoke else (Mesh(), Mesh(tp=2), Mesh(pp=2))
        )
    rounds, steps = (1, 1) if args.smoke else (ROUNDS, STEPS)
    results = {
        "collectives, ms": on_ranks(partial(collectives, rounds), 2)[1],
        "last stage waits, share": on_ranks(partial(pipeline, steps), 2)[1],
        "loading, worst rank": loads,
    }
    print(json.dumps(results, indent=1))
    write(
        args.json,
        "benchmarks.parallel.parallel_ranks",
        {"note": "two cores, shared with other work: compare within a table", "results": results},
    )


if __name__ == "__main__":
    main()

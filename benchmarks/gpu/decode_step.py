"""A decode step launched kernel by kernel and replayed from a CUDA graph, of the same sequences, interleaved:
`python -m benchmarks.gpu.decode_step --json FILE` (one GPU, two minutes). Weights are made up; what is measured is a whole step
of a rank, with the filling of its inputs, greedy sampling, and the copy of new KV to host memory.

Predicted, before anything was run on a GPU: some ten launches a layer at about 10 µs each from Python bound a launched step of
the small model at 2 to 4 ms whatever its batch, and a replayed one reads its weights in 0.4 ms: 4 times as fast at 1 to 32
sequences, 2 times at 128. The large model's weights alone take 4 ms: 1.0 to 1.3.

`of_bandwidth` is the least time in which the step's bytes can be read, at the measured copy bandwidth, over the replayed step's;
`idle` is the share of the time in which the GPU runs no kernel.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.decode_step --interpret-smoke` runs it once, tiny, without a GPU: its times mean
nothing."""

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.limits import measure as measure_limits
from benchmarks.gpu.rank import BLOCK_SIZE, Rank, decode_plan
from benchmarks.gpu.session import Verdict, begin, parser, write
from benchmarks.gpu.shapes import SHAPES, Shape
from core.kv import num_blocks_for
from engine.execution.decode_graphs import DecodeGraphs
from engine.execution.graph_capture import CudaCapture, again
from engine.execution.runner import Runner
from kernels.triton.platform import INTERPRETED

Row = dict[str, Any]
CONTEXT = 40 if INTERPRETED else 1024
BATCHES = (1, 3) if INTERPRETED else (1, 8, 32, 64, 128, 256)
_ROUNDS = 2 if INTERPRETED else 30


@torch.inference_mode()
def measure(shape: Shape, device: torch.device, bytes_per_s: float) -> Iterator[Row]:
    per_context = num_blocks_for(CONTEXT, BLOCK_SIZE) * BLOCK_SIZE
    rank = Rank.of(shape, max(BATCHES) * per_context, device)
    capture = again if INTERPRETED else CudaCapture(device)
    most_blocks = num_blocks_for(rank.model.spec.max_context_tokens, BLOCK_SIZE)
    graphs = DecodeGraphs(rank.model, rank.pool, BLOCK_SIZE, most_blocks, BATCHES, capture)
    runners = {
        "launched": Runner(rank.model, rank.pool, BLOCK_SIZE),
        "replayed": Runner(rank.model, rank.pool, BLOCK_SIZE, graphs=graphs),
    }
    for batch in BATCHES:
        times: dict[str, list[float]] = {name: [] for name in runners}
        said: dict[str, list[int]] = {}
        for step in range(_ROUNDS + 1):
            for name, runner in runners.items():
                result = runner.step(decode_plan(step, batch, CONTEXT, known=step > 0))
                assert result.replayed == (name == "replayed")
                said[name] = [one.token for one in result.sampled]
                times[name] += [result.duration_s] if step else []
        alike = sum(a == b for a, b in zip(said["launched"], said["replayed"], strict=True)) / batch
        medians = {f"{name}_ms": 1e3 * statistics.median(each) for name, each in times.items()}
        floor_ms = 1e3 * shape.decode_bytes(batch, CONTEXT) / bytes_per_s
        yield {
            "model": shape.name,
            "batch": batch,
            "context": CONTEXT,
            **medians,
            "tokens_alike": alike,
            "of_bandwidth": floor_ms / medians["replayed_ms"],
            "idle": None if INTERPRETED else _idle_share(runners["replayed"], batch),
        }


def _idle_share(runner: Runner, batch: int, num_steps: int = 20) -> float:
    """Return the idle share of the time of steps that follow each other, by PyTorch's profiler of kernels on one stream."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    steps = itertools.count(_ROUNDS + 1)
    with torch.profiler.profile(activities=activities) as profile:
        started = time.perf_counter()
        for step in itertools.islice(steps, num_steps):
            runner.step(decode_plan(step, batch, CONTEXT, known=True))
        torch.cuda.synchronize()  # the last step's kernels belong to the time that is measured
        wall_s = time.perf_counter() - started
    busy_s = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    return max(0.0, 1 - busy_s / wall_s)


def verdicts(rows: list[Row]) -> list[Verdict]:
    """The targets are for the large model."""
    found: list[Verdict] = []
    for row in rows:
        what = f"decode of {row['model']}, batch {row['batch']}"
        if row["model"] == "8B" and row["batch"] in (1, 64, 128, 256):
            target = 0.8 if row["batch"] == 1 else 0.7
            found.append(Verdict(f"{what}, of the bandwidth", row["of_bandwidth"], target))
        if row["model"] == "8B" and row["batch"] == 256:
            found.append(Verdict(f"{what}, idle share", row["idle"], 0.03, at_least=False))
    return found


def main() -> None:
    args = parser(__doc__).parse_args()
    device = begin(args.interpret_smoke)
    limits = measure_limits(device)
    rows: list[Row] = []

    def save(complete: bool) -> None:
        content = {"copy_gb_per_s": limits.copy_bytes_per_s / 1e9, "steps": rows}
        write(args.json, "benchmarks.gpu.decode_step", device, content, verdicts(rows), complete=complete)

    print(
        f"{'':6} {'batch':>6} {'launched ms':>12} {'replayed ms':>12} {'times':>6} {'alike':>6} {'of bandwidth':>12}"
    )
    for shape in SHAPES:
        for row in measure(shape, device, limits.copy_bytes_per_s):
            rows.append(row)
            save(complete=False)
            times = row["launched_ms"] / row["replayed_ms"]
            print(
                f"{row['model']:6} {row['batch']:6} {row['launched_ms']:12.2f} {row['replayed_ms']:12.2f} {times:6.2f} "
                f"{row['tokens_alike']:6.2f} {row['of_bandwidth']:12.2f}",
                flush=True,
            )
    save(complete=True)


if __name__ == "__main__":
    main()

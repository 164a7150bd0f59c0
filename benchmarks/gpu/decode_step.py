"""A decode step launched kernel by kernel and replayed from a CUDA graph, of the same sequences:
`python -m benchmarks.gpu.decode_step --json FILE` (one GPU, two minutes). Weights are made up; what is measured is the time from
one step's end to the next one's, where each is launched behind the one that computes, as an instance does it: with the filling of
its inputs, greedy sampling, and the copy of its tokens to the host.

Predicted, before anything was run on a GPU: some ten launches a layer at about 10 µs each from Python bound a launched step of
the small model at 2 to 4 ms whatever its batch, and a replayed one reads its weights in 0.4 ms: 4 times as fast at 1 to 32
sequences, 2 times at 128. The large model's weights alone take 4 ms: 1.0 to 1.3. Capturing all sizes takes 5 s, and 0.5 GiB.

`of_bandwidth` is the least time in which the step's bytes can be read, at the measured copy bandwidth, over the step's, replayed
where it can be; `idle` is the share of time between a step's end and the next one's beginning, at the largest batch. A shape's
row without a batch has what its captures take, and which memory is nobody's tensor: CUDA's context, libraries and graphs, for
which the memory model keeps 2 GiB.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.decode_step --interpret-smoke` runs it once, tiny, without a GPU: its times mean
nothing."""

import statistics
import time
from functools import cached_property, partial
from itertools import pairwise

import torch

from benchmarks.gpu.limits import copy_rate
from benchmarks.gpu.rank import BLOCK_SIZE, Rank, ahead, decode_plans
from benchmarks.gpu.session import Results, Row, Verdict, begin, parser
from benchmarks.gpu.shapes import SHAPES, Shape
from core.kv import num_blocks_for
from core.plan import StepPlan, StepResult
from engine.execution.graphs.graph_capture import CudaCapture, again
from engine.execution.graphs.graph_sizes import auto_sizes
from engine.execution.graphs.step_graphs import StepGraphs
from engine.execution.runner import LaunchedStep, Runner
from kernels.triton.platform import INTERPRETED

CONTEXT = 40 if INTERPRETED else 1024
BATCHES = (1, 3) if INTERPRETED else (1, 64, 256, 8, 32, 128)
"""Batches that have targets come first."""
_WARM, _ROUNDS = (1, 3) if INTERPRETED else (5, 30)
_NUM_STEPS = _WARM + _ROUNDS


class Bench:
    """One shape's rank. What it needs is made when it is first asked for."""

    def __init__(self, shape: Shape, device: torch.device, bytes_per_s: float) -> None:
        self._shape, self._device, self._bytes_per_s = shape, device, bytes_per_s
        self._graphs: StepGraphs | None = None

    @cached_property
    def _rank(self) -> Rank:
        per_context = num_blocks_for(CONTEXT + _NUM_STEPS, BLOCK_SIZE) * BLOCK_SIZE
        return Rank.of(self._shape, max(BATCHES) * per_context, self._device)

    @cached_property
    def _runners(self) -> dict[str, Runner]:
        made = {"launched": self._rank.runner(max(BATCHES))}
        if self._graphs is not None:
            made["replayed"] = self._rank.runner(max(BATCHES), self._graphs)
        return made

    @torch.inference_mode()
    def captures(self) -> Row:
        """Capture the sizes that an instance captures. Without them the other rows have launched steps alone."""
        rank = self._rank
        capture = again if INTERPRETED else CudaCapture(self._device)
        most_blocks = num_blocks_for(rank.model.spec.max_context_tokens, BLOCK_SIZE)
        sizes, before = BATCHES if INTERPRETED else auto_sizes(max(BATCHES)), _beside_tensors()
        started = time.perf_counter()
        self._graphs = StepGraphs(
            rank.model, rank.pool, BLOCK_SIZE, most_blocks, sizes, capture, max_seqs=max(BATCHES)
        )
        _wait()
        return {
            "sizes": len(sizes),
            "seconds": time.perf_counter() - started,
            "reserved_bytes": 0 if INTERPRETED else torch.cuda.memory_reserved(),
            "beside_tensors_bytes_before": before - self._pool_bytes,
            "beside_tensors_bytes": _beside_tensors() - self._pool_bytes,
        }

    @torch.inference_mode()
    def steps(self, batch: int) -> Row:
        found: Row = {"model": self._shape.name, "batch": batch, "context": CONTEXT}
        said: list[list[list[int]]] = []
        for name, runner in self._runners.items():
            plans = decode_plans(batch, CONTEXT, _NUM_STEPS)
            ended, results = zip(*ahead(runner, plans), strict=True)
            assert all(result.replayed == (name == "replayed") for result in results)
            gaps = [end - start for start, end in pairwise(ended[_WARM - 1 :])]
            found[f"{name}_ms"] = 1e3 * statistics.median(gaps)
            said.append([[one.token for one in result.sampled] for result in results])
        best = "replayed" if "replayed" in self._runners else "launched"
        floor_s = self._shape.decode_bytes(batch, CONTEXT + _NUM_STEPS // 2) / self._bytes_per_s
        found["tokens_alike"] = _alike(said[0], said[-1])
        found["of_bandwidth"] = 1e3 * floor_s / found[f"{best}_ms"]
        return found

    @torch.inference_mode()
    def idle(self) -> Row:
        batch, runners = max(BATCHES), self._runners
        share = _idle_share(runners.get("replayed", runners["launched"]), batch)
        return {"model": self._shape.name, "batch": batch, "idle": share}

    @property
    def _pool_bytes(self) -> int:
        return 0 if INTERPRETED else self._rank.memory.region.num_bytes


def _alike(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of the first step's tokens that are alike: later ones follow from them."""
    return sum(a == b for a, b in zip(one[0], other[0], strict=True)) / len(one[0])


def _wait() -> None:
    if not INTERPRETED:
        torch.cuda.synchronize()  # what was launched belongs to the time or the memory that is measured


def _beside_tensors() -> int:
    if INTERPRETED:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _idle_share(runner: Runner, batch: int) -> float:
    """Return the share of the time of steps that follow each other between one step's last kernel and the next one's first."""
    marked = _Marked(runner)
    for _ in ahead(marked, decode_plans(batch, CONTEXT, _NUM_STEPS)):
        pass
    _wait()
    return idle_share(marked.spans()[_WARM:])


class _Marked:
    """A runner whose steps' beginnings and ends the GPU notes. (Under PyTorch's profiler a host launches more slowly.)"""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launched = self._runner.launch(plan)
        end.record()
        self._marks.append((start, end))
        return launched

    def finish(self, launched: LaunchedStep) -> StepResult:
        return self._runner.finish(launched)

    def spans(self) -> list[tuple[float, float]]:
        """Return when each step began and ended. All are over."""
        first = self._marks[0][0]
        return [(first.elapsed_time(start), first.elapsed_time(end)) for start, end in self._marks]


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Return which part of the time from the first beginning to the last end no span covers. Raises ValueError without any."""
    if not spans:
        raise ValueError("no step has run on the GPU")
    in_order = sorted(spans)
    began = until = in_order[0][0]
    idle = 0.0
    for start, end in in_order:
        idle, until = idle + max(0.0, start - until), max(until, end)
    return idle / max(1e-9, until - began)


def verdicts(rows: dict[str, Row]) -> list[Verdict]:
    """The targets are for the large model."""
    found: list[Verdict] = []
    for row in rows.values():
        if row.get("model") != "8B":
            continue
        what = f"decode of 8B, batch {row['batch']}"
        if "of_bandwidth" in row and row["batch"] in (1, 64, 128, 256):
            target = 0.8 if row["batch"] == 1 else 0.7
            found.append(Verdict(f"{what}, of the bandwidth", row["of_bandwidth"], target))
        if "idle" in row:
            found.append(Verdict(f"{what}, idle share", row["idle"], 0.03, at_least=False))
    return found


def main() -> None:
    args = parser(__doc__).parse_args()
    device = begin(args.interpret_smoke)
    results = Results(args.json, "benchmarks.gpu.decode_step", device, verdicts)
    bytes_per_s = copy_rate(device)
    for shape in SHAPES:
        bench = Bench(shape, device, bytes_per_s)
        made = {f"{shape.name}, batch {batch}": partial(bench.steps, batch) for batch in BATCHES}
        if not INTERPRETED:
            made[f"{shape.name}, idle"] = bench.idle
        if missing := results.missing(made):
            results.rows.pop(shape.name, None)  # graphs are of this process: they are captured again
            if not results.failed_by_itself(shape.name):
                results.make(shape.name, bench.captures)
            for name in missing:
                results.make(name, made[name])
    results.end()


if __name__ == "__main__":
    main()

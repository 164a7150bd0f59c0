"""The engine's own Python per decode step: planning, packing the batch, preparing the sampler, committing.

    python -m benchmarks.engine.engine_overhead [--json FILE]

The model and the sampling arithmetic are left out: steps return tokens at once. Prediction: 0.5 ms at batch 32; target: 1 ms."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import parser, write
from core.config.cluster_config import EngineConfig
from core.plan import Sampled, StepResult
from core.types import Request, SamplingParams
from decode.headroom_policy import HeadroomPolicy
from engine.execution.batch.batch import RankSeq, build_batch
from engine.execution.batch.step_memory import Pack
from engine.execution.sampling.sampler import RowSampling
from engine.planning.step_scheduler import StepScheduler

CPU = torch.device("cpu")


class Bench:
    def __init__(self, batch: int, prompt_tokens: int, steps: int) -> None:
        config = EngineConfig(max_num_seqs=batch, max_batch_tokens=batch * prompt_tokens)
        blocks = batch * (prompt_tokens + steps + 32) // config.block_size + batch
        self.block_size = config.block_size
        self.scheduler = StepScheduler(config, blocks, 100_000, HeadroomPolicy())
        self.seqs: dict[str, RankSeq] = {}
        for i in range(batch):
            prompt = tuple((i * 31 + j * 7) % 4000 for j in range(prompt_tokens))
            params = SamplingParams(temperature=0.0, max_tokens=steps + 16)
            self.scheduler.sequences.add(
                Request(id=f"r{i}", prompt=prompt, sampling=params, reply_to="frontend")
            )
        self.parts: dict[str, list[float]] = {"plan": [], "pack": [], "prepare sampler": [], "commit": []}

    def timed(self, part: str, call: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = call(*args)
        self.parts[part].append((time.perf_counter() - started) * 1e3)
        return result

    def step(self) -> None:
        plan = self.timed("plan", self.scheduler.plan, 0.0)
        for new in plan.new:
            self.seqs[new.key] = RankSeq(new)
        seqs = [self.seqs[work.key] for work in plan.work]
        self.timed("pack", build_batch, plan.work, seqs, self.block_size, CPU)
        self.timed("prepare sampler", self.prepare_sampler, seqs)
        sampled = tuple(Sampled(work.key, 5) for work in plan.work if work.samples)
        for work in plan.work:
            if work.samples:
                self.seqs[work.key].append(5)
        self.timed("commit", self.scheduler.commit, plan, StepResult(step=plan.step, sampled=sampled), 0.0)

    @staticmethod
    def prepare_sampler(seqs: list[RankSeq]) -> None:
        """What every row of an all-greedy batch is asked."""
        RowSampling(seqs, Pack())


def run(batch: int, prompt_tokens: int, steps: int) -> dict[str, float]:
    bench = Bench(batch, prompt_tokens, steps)
    for _ in range(steps):
        bench.step()
    medians = {part: statistics.median(values[10:]) for part, values in bench.parts.items()}
    totals = [sum(parts) for parts in zip(*bench.parts.values(), strict=True)][10:]
    return {
        **medians,
        "step p50": statistics.median(totals),
        "step p99": sorted(totals)[int(0.99 * len(totals))],
    }


def main() -> None:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    results = {
        f"batch {b}, prompt {p}": run(b, p, steps=30 if args.smoke else 300)
        for b, p in ((1, 128), (32, 128), (32, 1024), (64, 128))
    }
    for name, figures in results.items():
        print(f"{name:24s} " + "  ".join(f"{part} {ms:.3f}" for part, ms in figures.items()) + "  (ms)")
    write(args.json, "benchmarks.engine.engine_overhead", {"unit": "ms", "results": results})


if __name__ == "__main__":
    main()

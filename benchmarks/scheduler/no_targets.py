"""A class without targets, relative to first-come-first-served continuous batching on the same modelled engine.

    python -m benchmarks.scheduler.no_targets [--json FILE]

The device is 1, 4 and 16 times too slow for the class that used to be the default (2 s to the first token, 0.1 s a token). It is
offered chats at 0.6, 0.9 and 1.2 of what it can serve. The baseline places each request at once on the instance with the fewest
sequences. `named` is Baton with those two targets, for comparison.

Prediction, written first: without targets at least 0.98 of the baseline's tokens per second and at most 1.2 of its p99 time to
the first token, in every cell. With the targets named, below 0.9 and above 2 in the slowest cells."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

from baton.bench.traces import TraceRow
from benchmarks.report import parser, write
from core.types import Slo
from sim.baselines.table import entry_of
from sim.catalogue.cost import StepCost
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, production, simulate
from sim.outcome_report import ServedRequest, served_job

NO_TARGETS, NAMED = Slo(), Slo(ttft_s=2.0, tpot_s=0.1)
SLOWNESS, LOADS, INSTANCES = (1, 4, 16), (0.6, 0.9, 1.2), (1, 4)
_REQUESTS, _SEQUENCES, _BATCH_TOKENS = 300, 64, 512
_SEEDS = (0, 1)


def fleet(slowness: float, num_instances: int) -> CoarseConfig:
    """Return a fleet of a device whose full batch takes 0.1 s a step, made `slowness` times slower."""
    step = StepCost(
        overhead_s=0.004 * slowness,
        tokens_per_s=5000.0 / slowness,
        weights_read_s=0.06 * slowness,
        kv_token_read_s=1e-6 * slowness,
    )
    return CoarseConfig(
        num_prefill=0,
        num_decode=0,
        num_both=num_instances,
        step=step,
        max_batch_tokens=_BATCH_TOKENS,
        max_num_seqs=_SEQUENCES,
        asked_tokens=4096,
    )


def offered(
    config: CoarseConfig, slo: Slo, load: float, slowness: float, seed: int, num: int
) -> list[SimulatedRequest]:
    """Return `num` chats of about 500 prompt and 150 output tokens, at random instants."""
    rng, rows, at = random.Random(seed), list[TraceRow](), 0.0
    rate = load * config.num_instances * 3.4 / slowness
    for _ in range(num * config.num_instances):
        at += rng.expovariate(rate)
        prompt, output = rng.lognormvariate(5.9, 0.8), rng.lognormvariate(4.7, 0.8)
        rows.append(
            TraceRow(
                arrival_at=at,
                input_tokens=1 + min(3000, int(prompt)),
                output_tokens=1 + min(1000, int(output)),
            )
        )
    return jobs(Load(rows=rows, duration_s=inf), slo, config.block_tokens)


def measure(served: Sequence[ServedRequest]) -> dict[str, float]:
    """Return tokens per second until the last one, quantiles of the time to the first token, and the share that was refused."""
    done = [one for one in served if one.e2e_s < inf]
    ttft = sorted(one.ttft_s for one in served)
    last_at = max(one.at + one.e2e_s for one in done)
    return {
        "tokens_per_s": sum(one.num_output for one in done) / last_at,
        "ttft_p50_s": ttft[len(ttft) // 2],
        "ttft_p99_s": ttft[int(0.99 * len(ttft))],
        "ttft_max_s": ttft[-1],
        "unserved": 1 - len(done) / len(served),
    }


def run(way: str, slowness: float, num_instances: int, load: float, seed: int, num: int) -> dict[str, float]:
    config = fleet(slowness, num_instances)
    schedule = config.schedule.model_copy(update={"max_queue_wait_s": 1e6, "max_queued_requests": 1_000_000})
    config = replace(config, schedule=schedule)
    work = offered(config, NAMED if way == "named" else NO_TARGETS, load, slowness, seed, num)
    if way == "first come":
        simulate(replace(config, mixed_batch_tokens=_BATCH_TOKENS), work, entry_of("least-loaded+any").make)
    else:
        simulate(config, work, production)
    return measure([served_job(job) for job in work])


def cell(slowness: float, num_instances: int, load: float, num: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the means over seeds of each way, and of the ratios to the baseline of the same requests."""
    runs = {
        way: [run(way, slowness, num_instances, load, seed, num) for seed in seeds]
        for way in ("first come", "no targets", "named")
    }
    found: dict[str, Any] = {"slowness": slowness, "instances": num_instances, "load": load}
    found |= {way: {key: mean([one[key] for one in of]) for key in of[0]} for way, of in runs.items()}
    for way in ("no targets", "named"):
        pairs = [*zip(runs[way], runs["first come"], strict=True)]
        found[way]["tokens_ratio"] = mean([a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs])
        found[way]["ttft_p99_ratio"] = mean([a["ttft_p99_s"] / b["ttft_p99_s"] for a, b in pairs])
    return found


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def worst(cells: Sequence[Mapping[str, Any]], way: str) -> dict[str, float]:
    return {
        "least_tokens_ratio": min(one[way]["tokens_ratio"] for one in cells),
        "most_ttft_p99_ratio": max(one[way]["ttft_p99_ratio"] for one in cells),
    }


def main() -> None:
    args = parser(__doc__).parse_args()
    num, seeds = (20, (0,)) if args.smoke else (_REQUESTS, _SEEDS)
    places = [*product(SLOWNESS, INSTANCES, LOADS)][:: 9 if args.smoke else 1]
    cells: list[dict[str, Any]] = []
    for slowness, num_instances, load in places:
        one = cell(slowness, num_instances, load, num, seeds)
        cells.append(one)
        ratios = "   ".join(
            f"{way}: {one[way]['tokens_ratio']:.3f} tokens/s, {one[way]['ttft_p99_ratio']:.2f} p99 TTFT"
            for way in ("no targets", "named")
        )
        print(f"{slowness:2} times too slow, {num_instances} instances, load {load}: {ratios}", flush=True)
    found = {way: worst(cells, way) for way in ("no targets", "named")}
    print(found)
    write(args.json, "benchmarks.scheduler.no_targets", {"cells": cells, "worst": found})


if __name__ == "__main__":
    main()

"""Models that share memory which holds only some of them: requests in time by policy, simulated, one public trace per model.

    python -m benchmarks.scheduler.sharing_policies --traces ../shared/traces [--json FILE]

Four models, memory for two, and 10 minutes of a trace for each. A cell is a time to wake up, a target for the first token, and a
mean rate of requests per model. `demand` is the owner of `cluster/scheduler/residency`. `lru` swaps for each request, as Ollama
and llama-swap do. `own` has every model awake all the time with half the speed, so that the total is that of the two devices.

Prediction, written first: `demand` has at least 1.3 times the requests in time of `lru` in the mean over all cells, and never
less than 0.98 of them; most where targets are as long as some wakings, least where the load is light. `own` is ahead of both
wherever half the speed is enough, since it never wakes anything up."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from rich.progress import track

from baton.bench.traces import TraceRow, read_trace
from benchmarks.report import parser, write
from sim.model_sharing import (
    ByDemand,
    LeastRecentlyUsed,
    OwnDevices,
    SharedModel,
    SharedRequest,
    SharingPolicy,
    SharingSpeed,
    simulate_sharing,
)

TRACES = {
    "azure-code": "azure2023_code.csv.gz",
    "azure-chat": "azure2023_conv.csv.gz",
    "conversation": "mooncake_fast25_conversation.jsonl.gz",
    "deepseek-r1": "servegen_deepseek-r1_1h.csv.gz",
}
NUM_AWAKE, LASTS_S, PATIENCE_S, LEAST_AWAKE_S = 2, 600.0, 60.0, 2.0
PROMPT_TOKENS_PER_S, OUTPUT_TOKEN_S = 20_000.0, 0.01
WAKES_S, TARGETS_S, RATES = (1.0, 4.0), (2.0, 10.0, 30.0), (0.02, 0.1, 0.3)
"""Rates: requests per second and model."""
POLICIES: dict[str, Callable[[], SharingPolicy]] = {
    "demand": ByDemand,
    "lru": LeastRecentlyUsed,
    "own": OwnDevices,
}


@cache
def rows(folder: Path, trace: str) -> list[TraceRow]:
    return [row for row in read_trace(folder / TRACES[trace]) if row.arrival_at < LASTS_S]


def offered(folder: Path, trace: str, rate: float, lasts_s: float) -> list[SharedRequest]:
    """Return a part of a trace, at random: on average `rate` requests per second. Its bursts stay."""
    found = [row for row in rows(folder, trace) if row.arrival_at < lasts_s]
    rng, share = Random(0), rate * lasts_s / max(1, len(found))
    return [
        SharedRequest(row.arrival_at, row.input_tokens, row.output_tokens)
        for row in found
        if rng.random() < share
    ]


def run(folder: Path, policy: str, cell: tuple[float, float, float], lasts_s: float) -> dict[str, float]:
    wake_s, target_s, rate = cell
    part = NUM_AWAKE / len(TRACES) if policy == "own" else 1.0
    speed = SharingSpeed(
        wake_s=wake_s,
        prompt_tokens_per_s=PROMPT_TOKENS_PER_S * part,
        output_token_s=OUTPUT_TOKEN_S / part,
        least_awake_s=LEAST_AWAKE_S,
    )
    models = [
        SharedModel(trace, speed, target_s, PATIENCE_S, offered(folder, trace, rate, lasts_s))
        for trace in TRACES
    ]
    return simulate_sharing(models, POLICIES[policy](), NUM_AWAKE, lasts_s + PATIENCE_S)


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return requests in time of `demand` relative to the others'. Higher is better."""
    ratios = {
        other: [cell["demand"]["in_time"] / max(1e-3, cell[other]["in_time"]) for cell in cells]
        for other in ("lru", "own")
    }
    found: dict[str, Any] = {
        name: round(fmean(cell[name]["in_time"] for cell in cells), 3) for name in POLICIES
    }
    for other, each in ratios.items():
        found[f"demand / {other}"] = {
            "geometric mean": round(exp(fmean(map(log, each))), 3),
            "worst": round(min(each), 3),
            "best": round(max(each), 3),
        }
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    args = options.parse_args()
    lasts_s = 60.0 if args.smoke else LASTS_S
    grid = [(1.0, 10.0, 0.2)] if args.smoke else list(product(WAKES_S, TARGETS_S, RATES))
    cells: list[dict[str, Any]] = []
    for cell in track(grid, "cells"):
        results = {name: run(args.traces, name, cell, lasts_s) for name in POLICIES}
        cells.append({"wake_s": cell[0], "target_s": cell[1], "rate": cell[2], **results})
        shares = "   ".join(
            f"{name} {each['in_time']:.3f} ({each['wakings_per_hour']:.0f}/h)"
            for name, each in results.items()
        )
        print(f"wake {cell[0]:g} s, target {cell[1]:g} s, {cell[2]:g}/s: {shares}")
    found = summary(cells)
    print(json.dumps(found, indent=1))
    setup = {
        "models": list(TRACES),
        "awake": NUM_AWAKE,
        "lasts_s": lasts_s,
        "patience_s": PATIENCE_S,
        "least_awake_s": LEAST_AWAKE_S,
        "prompt_tokens_per_s": PROMPT_TOKENS_PER_S,
        "output_token_s": OUTPUT_TOKEN_S,
    }
    command = "benchmarks.scheduler.sharing_policies --traces ../shared/traces"
    write(args.json, command, {"setup": setup, "summary": found, "cells": cells})


if __name__ == "__main__":
    main()

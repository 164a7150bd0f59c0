"""What a batch of 1,000 requests beside an interactive load costs it: requests of the class `interactive` within their targets.

    python -m benchmarks.goodput batches [--json FILE] [--smoke]

The production ingress, scheduler and engine on two modelled devices of any role, under virtual time. Interactive requests (300
tokens in, 50 out) come at random for 20 s, alone and beside the batch, whose lines are alike and go `serve.batch_at_once` at a
time from the beginning on, as the batch runner sends them, in the class `batch`."""

import json
import random
from dataclasses import dataclass
from typing import Any

from benchmarks.report import parser, write
from core.config.cluster_config import ClusterConfig
from core.types import Slo
from sim.simulated_cluster import simulate
from sim.simulated_run import Arrival, BatchLoad, Outcome, SimConfig
from sim.virtual_loop import run_virtual

PREDICTION = "attainment falls by no more than a point at each rate"
DEFAULTS = ClusterConfig()
RATES, DURATION_S, NUM_LINES, NUM_PROMPT, NUM_OUTPUT = (10.0, 30.0, 60.0), 20.0, 1000, 300, 50


@dataclass(frozen=True)
class Sizes:
    duration_s: float
    num_lines: int


def arrival(rng: random.Random, at: float) -> Arrival:
    prompt = tuple(rng.randrange(1, 30_000) for _ in range(NUM_PROMPT))
    return Arrival(at, prompt, NUM_OUTPUT, rng.randrange(1 << 30))


def interactive(rate: float, duration_s: float) -> list[Arrival]:
    rng, found, at = random.Random(int(rate)), list[Arrival](), 0.0
    while (at := at + rng.expovariate(rate)) < duration_s:
        found.append(arrival(rng, at))
    return found


def attainment(outcome: Outcome, slo: Slo) -> float:
    """The share of requests within both targets; who was refused or lost is not."""
    gaps = NUM_OUTPUT - 1
    return sum(
        first <= slo.ttft_s and last - first <= slo.tpot_s * gaps
        for first, last in zip(outcome.first_token_at, outcome.last_token_at, strict=True)
    ) / len(outcome.tokens)


def measure(rate: float, sizes: Sizes) -> dict[str, Any]:
    slos, at_once = DEFAULTS.slo_classes, DEFAULTS.serve.batch_at_once
    config = SimConfig(num_prefill=0, num_decode=0, num_both=2, slo=slos["interactive"])
    rng = random.Random(0)
    lines = [arrival(rng, 0.0) for _ in range(sizes.num_lines)]
    batch = BatchLoad(lines=lines, at_once=at_once, slo=slos["batch"])
    arrivals = interactive(rate, sizes.duration_s)
    alone = run_virtual(simulate(config, arrivals))
    beside = run_virtual(simulate(config, arrivals, batch=batch))
    shares = [attainment(outcome, config.slo) for outcome in (alone, beside)]
    return {
        "requests_per_s": rate,
        "interactive_requests": len(arrivals),
        "attainment": {"alone": round(shares[0], 4), "beside": round(shares[1], 4)},
        "falls_by_points": round(100 * (shares[0] - shares[1]), 2),
        "lines_answered": len(beside.batch_s),
        "lines_answered_while_requests_came": sum(at <= sizes.duration_s for at in beside.batch_s),
        "batch_s": round(max(beside.batch_s), 2),
    }


def main() -> None:
    args = parser(__doc__).parse_args()
    sizes = Sizes(2.0, 20) if args.smoke else Sizes(DURATION_S, NUM_LINES)
    rows = [measure(rate, sizes) for rate in RATES]
    print(json.dumps(rows, indent=2))
    write(args.json, "benchmarks.goodput batches", {"prediction": PREDICTION, "rows": rows})


if __name__ == "__main__":
    main()

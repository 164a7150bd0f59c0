"""Simulate a trace on modelled GPUs: `python examples/simulate_trace.py [--trace FILE]`, and `baton simulate` for more.

Without a file it makes up a trace: 5 requests a second for 20 s. The scheduler is the production one, devices are modelled."""

import argparse
import random
from pathlib import Path

from baton.bench.traces import TraceRow, read_trace
from core.types import Slo
from sim.catalogued import Fleet, coarse_config
from sim.coarse.coarse_workload import Load, jobs, natural_block_tokens
from sim.coarse.world import simulate
from sim.outcome_report import attainment, served_coarsely

SLO = Slo(name="chat", ttft_s=0.5, tpot_s=0.05)
FLEETS = {
    "2 of any role": Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=0, num_decode=0, num_both=2),
    "1 prefill, 1 decode": Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=1, num_decode=1),
}


def made_up(rate: float, seconds: float) -> list[TraceRow]:
    rng = random.Random(0)
    return [
        TraceRow(
            arrival_at=number / rate, input_tokens=rng.randint(500, 6000), output_tokens=rng.randint(20, 400)
        )
        for number in range(int(rate * seconds))
    ]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trace", type=Path, help="Mooncake, ShareGPT, Azure or ServeGen; .gz too")
    options.add_argument("--seconds", type=float, default=20.0)
    args = options.parse_args()
    rows = read_trace(args.trace) if args.trace else made_up(5.0, args.seconds)
    block_tokens = natural_block_tokens(rows)
    for name, fleet in FLEETS.items():
        for copies in (1, 2, 4):
            work = jobs(Load(rows=rows, duration_s=args.seconds, copies=copies), SLO, block_tokens)
            outcome = simulate(coarse_config(fleet, block_tokens), work)
            share = attainment(served_coarsely(outcome), SLO)
            print(
                f"{name:20} {len(work) / args.seconds:6.1f} requests/s: {share:6.1%} within 500 ms / 50 ms a token"
            )

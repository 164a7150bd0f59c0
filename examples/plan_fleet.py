"""Find the cheapest GPUs for a trace and its targets: `python examples/plan_fleet.py [--trace FILE]`, and `baton plan` for more.

Without a file it makes up a trace: 5 requests a second for 20 s. Each fleet is simulated with the production scheduler."""

import argparse
from pathlib import Path

from simulate_trace import made_up

from baton.bench.traces import read_trace
from core.types import Slo
from sim.coarse.coarse_workload import natural_block_tokens
from sim.goodput import Window
from sim.planner import Demand, Trial, cheapest, plan


def line(trial: Trial) -> str:
    fleet = trial.fleet
    size = (
        f"{fleet.num_both} any role"
        if fleet.num_both
        else f"{fleet.num_prefill} prefill, {fleet.num_decode} decode"
    )
    group = f"{fleet.gpu} tp {fleet.tp} pp {fleet.pp}"
    return f"{group:16} {size:20} {fleet.dollars_per_h:7.2f} $/h {trial.mean:7.1%} in time"


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trace", type=Path, help="Mooncake, ShareGPT, Azure or ServeGen; .gz too")
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--gpus", default="H100,L40S")
    options.add_argument("--attainment", type=float, default=0.95)
    args = options.parse_args()
    rows = read_trace(args.trace) if args.trace else made_up(5.0, args.seconds)
    demand = Demand(
        model="llama-3.1-8b",
        window=Window(rows, 0.0, args.seconds, natural_block_tokens(rows)),
        slo=Slo(name="chat", ttft_s=1.0, tpot_s=0.05),
        attainment=args.attainment,
        seeds=(0,),
        gpus=args.gpus.split(","),
        max_instances=8,
    )
    trials = plan(demand, lambda trial: print(line(trial), flush=True))
    best = cheapest(trials, args.attainment)
    print(f"cheapest: {line(best)}" if best else "no fleet of up to 8 instances holds the targets")

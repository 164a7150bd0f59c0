"""Find the cheapest GPUs for a trace and its targets: `python examples/plan_fleet.py [--trace FILE]`, and `baton plan` for more.

Without a file it makes up a trace: 5 requests a second for 20 s. Each fleet is simulated with the production scheduler."""

import argparse
from pathlib import Path

from simulate_trace import made_up

from baton.bench.traces import read_trace
from baton.plan_report import PlanFinding
from core.types import Slo
from sim.planning.plan_demand import trace_demand
from sim.planning.plan_fleets import Hardware
from sim.planning.plan_trial import Trial
from sim.planning.planner import Targets, plan


def line(trial: Trial) -> str:
    return f"{trial.name:30} {trial.dollars_per_h:7.2f} $/h {trial.attained:7.1%} in time"


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--trace", type=Path, help="Mooncake, ShareGPT, Azure or ServeGen; .gz too")
    options.add_argument("--gpus", default="H100,L40S")
    options.add_argument("--attainment", type=float, default=0.95)
    args = options.parse_args()
    demand = trace_demand(
        read_trace(args.trace) if args.trace else made_up(5.0, 20.0),
        Hardware(model="llama-3.1-8b", gpus=args.gpus.split(",")),
        Targets(slo=Slo(name="chat", ttft_s=1.0, tpot_s=0.05), attainment=args.attainment, max_instances=8),
    )
    print(PlanFinding(demand, plan(demand, lambda trial: print(line(trial), flush=True))).sentence)

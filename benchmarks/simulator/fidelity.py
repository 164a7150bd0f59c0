"""The real server on this machine against its simulation on what `baton profile` has measured.

    python -m benchmarks.simulator.fidelity --profile profile.json --json benchmarks/results/fidelity.json

For every rate, in turn and several times over: a few lone requests (the machine's pace), a few at once, then an open loop
against the server, then the same arrivals, prompt and output lengths in the full simulation. Three figures are taken from the
lone requests: the pace of decode steps and of prompts, by which those of the profile are stretched (a shared machine is slower
now than when it was profiled), and what HTTP and the way to the engine add to the first token. One is taken from those at once:
what each further stream adds to a step, since delivering its tokens needs the processor that computes them. Everything under
load is predicted. The floor is how far two real runs of the same work are from each other, each divided by its pace: nobody can
be expected to come nearer.

Predicted before the first run: on a busy machine the floor is above the targets (mean 5 % and P99 10 % of TTFT, ITL 2 %, E2E 3 %,
knee 5 %); the simulation is off by no more than twice the floor below the knee, and too optimistic above it, where client and
server compete for cores, which it does not know."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from rich.progress import Progress

from baton.bench.bench_report import machine
from baton.bench.bench_workload import BenchRequest, synthetic
from baton.bench.client import Client, Record, closed_loop, open_loop
from baton.bench.measure import gaps_s, ttft_s
from benchmarks.report import parser
from benchmarks.serving.serving_overhead import server
from core.config.cluster_config import load
from core.cost.step_profile import Profile, read_profile
from sim.catalogue.cost import PacedCost
from sim.catalogued import Fleet, full_config
from sim.simulated_cluster import simulate
from sim.simulated_run import VOCAB_SIZE, Arrival, SimConfig
from sim.virtual_loop import run_virtual

INPUT_TOKENS, OUTPUT_TOKENS, SPREAD = 256, 48, 0.5
LONE, LONE_INPUTS = 4, (64, 448)
"""The number of lone requests of each prompt length."""
TOGETHER = 4
"""The number of requests at once, which is tried twice."""
SLO = load(None, {}, {}).slo_classes["interactive"]
ASKED = {"temperature": 0, "ignore_eos": True, "service_tier": SLO.name}
FIGURES = ("ttft_mean", "ttft_p99", "itl_mean", "itl_p99", "e2e_mean", "e2e_p99")
FLEETS = {
    "local": (("--local", "--prefill", "0"), 0, 1),
    "pools": (("--prefill", "1", "--decode", "1"), 1, 1),
}
"""Name -> (arguments of `baton serve`, prefill instances, decode instances)."""


@dataclass(frozen=True, slots=True)
class Trip:
    """One request, in seconds since it was sent."""

    ttft_s: float
    e2e_s: float
    gaps_s: tuple[float, ...]

    @property
    def tpot_s(self) -> float:
        return fmean(self.gaps_s) if self.gaps_s else 0.0

    def holds(self) -> bool:
        return self.ttft_s <= SLO.ttft_s and self.tpot_s <= SLO.tpot_s


def timed(work: Sequence[BenchRequest], rate: float, seed: int) -> list[BenchRequest]:
    """Poisson arrivals."""
    rng, at, result = Random(seed), 0.0, list[BenchRequest]()
    for job in work:
        at += rng.expovariate(rate)
        result.append(replace(job, arrival_at=at))
    return result


async def ask(url: str, run: Callable[[Client], Any]) -> list[Record]:
    client = Client(url, "baton-embedded", "", 300, ASKED, chat=False)
    try:
        records = await run(client)
    finally:
        await client.close()
    failed = [record.error for record in records if record.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return records


def real_trip(record: Record) -> Trip:
    return Trip(ttft_s(record), record.tokens_at[-1] - record.sent_at, tuple(gaps_s(record)))


def lone_work(run: int) -> list[BenchRequest]:
    """Short and long prompts by turns, far apart."""
    each = [
        synthetic(LONE, tokens, OUTPUT_TOKENS, 0.0, vocab_size=4000, seed=tokens, run=run)
        for tokens in LONE_INPUTS
    ]
    return [replace(job, arrival_at=10.0 * i) for i, job in enumerate(chain(*zip(*each, strict=True)))]


def together_work(run: int) -> list[BenchRequest]:
    short = LONE_INPUTS[0]
    each = synthetic(2 * TOGETHER, short, OUTPUT_TOKENS, 0.0, vocab_size=4000, seed=short, run=run)
    return [replace(job, arrival_at=10.0 * (i // TOGETHER)) for i, job in enumerate(each)]


def calibrated(url: str, work: Sequence[BenchRequest], streams: int) -> list[Trip]:
    records = asyncio.run(ask(url, lambda client: closed_loop(client, work, streams, lambda _: None)))
    return [real_trip(record) for record in records]


def simulated(config: SimConfig, work: Sequence[BenchRequest], front_s: float) -> list[Trip]:
    """`front_s` is added to each first token."""
    rng = Random(1)
    arrivals = [
        Arrival(job.arrival_at, tuple(rng.randrange(1, VOCAB_SIZE) for _ in job.prompt), job.max_tokens, i)
        for i, job in enumerate(work)
    ]
    outcome = run_virtual(simulate(config, arrivals))
    return [
        Trip(
            times[0] + front_s,
            times[-1] + front_s,
            tuple(b - a for a, b in pairwise(times)),
        )
        for times in outcome.token_times
    ]


def fitted(
    fleet: Fleet, lone_trips: Sequence[Trip], together: Sequence[Trip]
) -> tuple[SimConfig, PacedCost, float]:
    """(configuration at the pace of these trips of `lone_work` and `together_work`, that pace, what the front adds to a first
    token)."""
    config = full_config(fleet, SLO)
    alone = simulated(config, lone_work(0), 0.0)
    decode = median(trip.tpot_s for trip in lone_trips) / median(trip.tpot_s for trip in alone)
    growth = _growth_s(lone_trips) / _growth_s(alone)
    pace = PacedCost(config.step, decode, max(0.1, growth))
    paced = replace(config, step=pace)
    first_s = median(trip.ttft_s for trip in simulated(paced, lone_work(0), 0.0))
    later_s = _gap_s(together) - _gap_s(simulated(paced, together_work(0), 0.0))
    pace = replace(pace, stream_s=max(0.0, later_s / (TOGETHER / fleet.num_decode - 1)))
    paced = replace(config, step=pace)
    return paced, pace, max(0.0, median(trip.ttft_s for trip in lone_trips) - first_s)


def _growth_s(trips: Sequence[Trip]) -> float:
    """By how much later the first token of a long prompt comes than that of a short one."""
    return median(trip.ttft_s for trip in trips[1::2]) - median(trip.ttft_s for trip in trips[::2])


def _gap_s(trips: Sequence[Trip]) -> float:
    return median(gap for trip in trips for gap in trip.gaps_s)


def figures(trips: Sequence[Trip]) -> dict[str, float]:
    """Seconds, and the share within the targets."""
    values = {
        "ttft": [t.ttft_s for t in trips],
        "itl": [gap for t in trips for gap in t.gaps_s],
        "e2e": [t.e2e_s for t in trips],
    }
    result = {f"{name}_mean": fmean(each) for name, each in values.items()}
    result |= {f"{name}_p99": sorted(each)[int(0.99 * (len(each) - 1))] for name, each in values.items()}
    return result | {"attainment": sum(t.holds() for t in trips) / len(trips)}


def one_run(url: str, fleet: Fleet, rate: float, count: int, number: int) -> dict[str, Any]:
    lone = calibrated(url, lone_work(1000 + number), 1)
    together = calibrated(url, together_work(2000 + number), TOGETHER)
    config, pace, front_s = fitted(fleet, lone, together)
    work = timed(
        synthetic(count, INPUT_TOKENS, OUTPUT_TOKENS, SPREAD, vocab_size=4000, seed=1, run=number),
        rate,
        seed=2,
    )
    records = asyncio.run(ask(url, lambda client: open_loop(client, work, lambda _: None)))
    real = figures([real_trip(record) for record in records])
    return {
        "rate": rate,
        "pace": {"decode": pace.decode, "prompt": pace.prompt, "stream_s": pace.stream_s},
        "front_s": front_s,
        "real": real,
        "simulated": figures(simulated(config, work, front_s)),
    }


def knee(shares: dict[float, float]) -> float:
    """Rate at which attainment falls below 90 %, interpolated; the largest where it never does, 0 where it always is."""
    before = (0.0, 1.0)
    for rate, share in sorted(shares.items()):
        if share < 0.9:
            return before[0] + (rate - before[0]) * (before[1] - 0.9) / (before[1] - share)
        before = rate, share
    return before[0]


def summary(runs: Sequence[dict[str, Any]], rates: Sequence[float]) -> dict[str, Any]:
    """By rate: the median error of the simulation, and the floor."""
    result: dict[str, Any] = {}
    for rate in rates:
        own = [run for run in runs if run["rate"] == rate]
        result[f"{rate:g}"] = {
            name: {
                "real_ms": median(run["real"][name] for run in own) * 1e3,
                "error": median(run["simulated"][name] / run["real"][name] - 1 for run in own),
                "floor": median(
                    abs(a["real"][name] / b["real"][name] * _pace(b, name) / _pace(a, name) - 1)
                    for a, b in combinations(own, 2)
                ),
            }
            for name in FIGURES
        }
    knees = {
        side: knee(
            {rate: median(run[side]["attainment"] for run in runs if run["rate"] == rate) for rate in rates}
        )
        for side in ("real", "simulated")
    }
    return {"by_rate": result, "knee": knees}


def _pace(run: dict[str, Any], figure: str) -> float:
    return run["pace"]["prompt" if figure.startswith("ttft") else "decode"]


def study(
    fleet_name: str, profile: Profile, rates: Sequence[float], rounds: int, count: int
) -> dict[str, Any]:
    arguments, num_prefill, num_decode = FLEETS[fleet_name]
    fleet = Fleet(
        gpu="H100", model="llama-3.1-8b", num_prefill=num_prefill, num_decode=num_decode, profile=profile
    )
    runs: list[dict[str, Any]] = []
    with server(*arguments) as url, Progress() as bar:
        task = bar.add_task(fleet_name, total=rounds * len(rates))
        calibrated(url, lone_work(999), 1)  # warms up
        for number in range(rounds):
            for i, rate in enumerate(rates):
                runs.append(one_run(url, fleet, rate, count, number * len(rates) + i))
                bar.advance(task)
    return {"summary": summary(runs, rates), "runs": runs}


def main() -> None:
    options = parser(__doc__, must_write=True)
    options.add_argument("--profile", type=Path, required=True)
    options.add_argument("--fleets", nargs="*", default=[*FLEETS])
    options.add_argument("--rates", nargs="*", type=float, default=[2.0, 4.0, 8.0, 12.0, 16.0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--requests", type=int, default=100)
    args = options.parse_args()
    if args.smoke:
        args.fleets, args.rates, args.rounds, args.requests = ["local"], [4.0], 2, 4
    result: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    profile = read_profile(args.profile)
    setup = machine() | {
        "load_average": os.getloadavg()[0],
        "profile": profile.model_dump(),
        "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
        "work": f"{args.requests} requests of {INPUT_TOKENS} + {OUTPUT_TOKENS} tokens, each +-{SPREAD:.0%}",
        "command": "python -m benchmarks.simulator.fidelity --profile profile.json --json benchmarks/results/fidelity.json "
        f"--rates {' '.join(f'{rate:g}' for rate in args.rates)} --rounds {args.rounds} --requests {args.requests}",
    }
    for name in args.fleets:
        result[name] = {"setup": setup} | study(name, profile, args.rates, args.rounds, args.requests)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(result[name]["summary"], indent=1))


if __name__ == "__main__":
    main()

"""By how much two schedulers' shares in time differ at one load, whatever the arrivals.

    python -m benchmarks.goodput arrivals --traces ../shared/traces [--at worst azure-chat/interactive/0|memory/2|20.24
    ...]
        [--schedulers baton sarathi+refuse ...] [--arrivals 5] [--hours 24] [--json FILE]

A search (`wide`) says of two schedulers that one serves a step more, which is 1.06 or 1.08. It asks
one set of arrivals whether 90 % are in time, so a request or two may decide. Here every scheduler gets the same requests at the
same load, at the instants of several seeds: the mean of its shares in time, their deviation, what the others missed by, and how
far Baton is ahead of each other on the same arrivals, with the standard error of that. A place is a window, a device and a
load: a rate in requests per second and instance, or `3 copies` of all sessions, whose turns come the sooner the sooner they are
answered. `PLACES` has names for several. Runs that the output file has are not made again, unless other code made them; it is
written after each.

Predictions, written first. `worst`: at the rate at which Baton's search failed and a baseline's did not, the shares differ by
less than twice the standard error in three of the four cells that are below 0.98. `lowest`: Baton is behind by no more than 2.5
points in any, since the curves of all are flat there. `agents`: ahead by 2 to 5 points at both. At the first place of `tenants`:
ahead by 3 points, and by 5 for the light half of the tenants; of `experts`: neither ahead nor behind by more than 2 points. Of
their other places and of `sure` nothing was predicted."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.goodput.loads import Cell
from benchmarks.goodput.search import code, is_due
from benchmarks.report import parser, write
from sim.baselines.table import OURS
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.goodput import serve
from sim.outcome_report import served_job

PLACES: dict[str, tuple[str, ...]] = {
    "worst": (
        "azure-chat/interactive/0|memory/2|20.24",
        "synthetic/standard/0|memory/2|2.236",
        "sharegpt/interactive/0|prefill/2|16",
        "sharegpt/interactive/0|L40S|4.143",
    ),
    "lowest": (
        "conversation/standard/1|base|1.318",
        "conversation/standard/1|memory/2|1.318",
        "synthetic/standard/2|base|1.042",
        "synthetic/standard/2|memory/2|0.9822",
    ),
    "agents": ("agents/interactive/0|base|19 copies", "agents/interactive/0|base|25 copies"),
    "tenants": ("deepseek-r1+tenants/mixed/0|base|20", "deepseek-r1+tenants/mixed/0|base|28"),
    "experts": (
        "azure-chat/interactive/0|MoE on 8|20",
        "azure-chat/interactive/0|MoE on 8|28",
        "azure-chat/interactive/0|MoE on 8|40",
    ),
    "sure": (
        "azure-chat/interactive/0|base|23.5",
        "azure-code/interactive/0|base|10.5",
        "sharegpt/interactive/0|base|17.5",
        "deepseek-r1/standard/0|base|20",
    ),
}
"""`worst` and `lowest`: rates that only a baseline was found to serve, in the four cells of seed 0 below 0.98, and in the four
where Baton is lowest of all three seeds. `agents`: as many sessions as the best scheduler serves with about 95 % and 86 % of the
turns in time. `sure`: rates at which about 99 % are in time."""
OTHERS = ("sarathi+refuse", "sarathi+refuse+engine", "mooncake+any+engine")
MISSES = ("late", "slow", "refused")


def run(traces: Path, place: str, scheduler: str, arrivals: int) -> dict[str, float]:
    """Return the share of all requests that held both targets of their class, and what it is made of (`shares`)."""
    window, device, load = place.split("|")
    cell = Cell(traces, window, device, scheduler)
    part, (amount, _, is_copies) = cell.part, load.partition(" ")
    copies = float(amount) if is_copies else float(amount) / cell.rate_per_copy
    work = part.jobs(copies, arrivals, cell.targets)
    serve(work, part.block_tokens, fleet=cell.fleet, entry=cell.entry)
    return shares(work)


def shares(work: Sequence[SimulatedRequest]) -> dict[str, float]:
    """Return the share in time, of all that came late, too slowly or not at all, and where there are several classes or tenants
    the share in time of each class, and of the requests of that half of the tenants that asks least."""
    by_class: dict[str, list[SimulatedRequest]] = {}
    for job in work:
        by_class.setdefault(job.request.slo.name, []).append(job)
    found = {"share": _share(work)}
    found |= {miss: round(sum(_miss(job) == miss for job in work) / len(work), 4) for miss in MISSES}
    if len(by_class) > 1:
        found |= {f"share of {name}": _share(jobs) for name, jobs in sorted(by_class.items())}
    tenants = [name for name, _ in Counter(job.request.tenant for job in work).most_common()]
    if len(tenants) > 1:
        light = set(tenants[len(tenants) // 2 :])
        found["share of light tenants"] = _share([job for job in work if job.request.tenant in light])
    return found


def _share(work: Sequence[SimulatedRequest]) -> float:
    return round(sum(not _miss(job) for job in work) / len(work), 4)


def _miss(job: SimulatedRequest) -> str:
    """Return what a request's targets were missed by; empty where they were held."""
    served, slo = served_job(job), job.request.slo
    if served.holds(slo):
        return ""
    return "refused" if job.rejected else "late" if served.ttft_s > slo.ttft_s else "slow"


def summary(runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the mean and the deviation of each scheduler's shares (scheduler -> arrivals -> run), the means of what they are
    made of, and by how much ours is ahead of each other's on the arrivals of both."""
    ours = runs.get(OURS, {})
    found = dict[str, Any]()
    for name, of in runs.items():
        found[name] = _spread(one["share"] for one in of.values()) | _parts([*of.values()])
        both = [ours[seed]["share"] - one["share"] for seed, one in of.items() if seed in ours]
        if both and name != OURS:
            ahead = _spread(both)
            found[name]["ahead"] = ahead["mean"]
            found[name]["ahead_error"] = round(ahead["deviation"] / sqrt(len(both)), 4)
    return found


def _parts(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = [name for name in runs[0] if name not in ("share", "code") and all(name in one for one in runs)]
    return {"made of": {name: round(fmean(one[name] for one in runs), 4) for name in names}} if names else {}


def _spread(values: Iterable[float]) -> dict[str, float]:
    values = [*values]
    return {
        "mean": round(fmean(values), 4),
        "deviation": round(stdev(values), 4) if len(values) > 1 else 0.0,
    }


def by_name(places: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each name in `PLACES` by how much ours is ahead of the best other at its places: in the mean, at the worst one,
    and at how many ours is behind by more than two standard errors."""
    found = dict[str, dict[str, float]]()
    for name, known in PLACES.items():
        others = [[one for one in places[at].values() if "ahead" in one] for at in known if at in places]
        best = [max(of, key=lambda one: one["mean"]) for of in others if of]
        if best:
            ahead = [one["ahead"] for one in best]
            num_behind = sum(one["ahead"] < -2 * one["ahead_error"] for one in best)
            found[name] = {
                "ahead": round(fmean(ahead), 4),
                "worst": min(ahead),
                "behind": num_behind,
                "places": len(best),
            }
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    options.add_argument("--at", nargs="*", default=["worst"], metavar="NAME|WINDOW|DEVICE|LOAD")
    options.add_argument("--schedulers", nargs="*", default=[OURS, *OTHERS])
    options.add_argument("--arrivals", type=int, default=5)
    options.add_argument(
        "--hours", type=float, default=24.0, help="Then it stops; go on with the same command."
    )
    args = options.parse_args()
    if args.smoke:
        args.at = [f"azure-code/mixed/0|{device}|2" for device in ("base", "base+host")]
        args.schedulers, args.arrivals = [OURS, "sarathi"], 2
    ends_at = time.monotonic() + args.hours * 3600
    runs: dict[str, Any] = {}
    if args.json and args.json.exists():
        runs = json.loads(args.json.read_text())["runs"]
    for place in (place for word in args.at for place in PLACES.get(word, (word,))):
        for arrivals in range(args.arrivals):
            for name in args.schedulers:
                key = f"{place}|{name}|{arrivals}"
                if not is_due(runs.get(key), again=True) or time.monotonic() > ends_at:
                    continue
                runs[key] = run(args.traces, place, name, arrivals) | {"code": code()}
                print(f"{runs[key]['share']:.4f}  {key}", flush=True)
                _write(args.json, runs)


def _write(path: Path | None, runs: Mapping[str, Any]) -> None:
    by_place: dict[str, dict[str, dict[str, Any]]] = {}
    for key, one in runs.items():
        *place, name, seed = key.split("|")
        by_place.setdefault("|".join(place), {}).setdefault(name, {})[seed] = one
    places = {place: summary(found) for place, found in by_place.items()}
    content = {"names": by_name(places), "places": places, "runs": runs}
    write(path, "benchmarks.goodput arrivals --traces ../shared/traces", content)


if __name__ == "__main__":
    main()

"""By how much two schedulers' shares in time differ at one rate, whatever the arrivals.

    python -m benchmarks.goodput_arrivals --traces ../shared/traces [--at azure-chat/interactive/0|memory/2|20.24 ...]
        [--schedulers baton sarathi+refuse ...] [--arrivals 5] [--hours 24] [--json FILE]

A search (`benchmarks.goodput_wide`) says of two schedulers that one serves a step more, which is 1.06 or 1.08. It asks one set of
arrivals whether 90 % are in time, so a request or two may decide. Here every scheduler gets the same requests at the same rate,
at the instants of several seeds: the mean of its shares in time, their deviation, and how far Baton is ahead of each other on the
same arrivals, with the standard error of that. A place is a window, a device and a rate in requests per second and instance. Runs
that the output file has are not made again, unless other code made them; it is written after each.

Prediction, written first: at the rate at which Baton's search failed and a baseline's did not, the shares differ by less than
twice the standard error in three of the four cells that are below 0.98."""

import json
import time
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.goodput import NUM_GPUS
from benchmarks.goodput_wide import TARGETS, Cell, code, fleet_of, offered
from benchmarks.report import parser, write
from sim.baselines.table import OURS, entry_of
from sim.goodput import attained

PLACES = (
    "azure-chat/interactive/0|memory/2|20.24",
    "synthetic/standard/0|memory/2|2.236",
    "sharegpt/interactive/0|prefill/2|16",
    "sharegpt/interactive/0|L40S|4.143",
)
OTHERS = ("sarathi+refuse", "sarathi+refuse+engine", "mooncake+any+engine")


def share(traces: Path, place: str, scheduler: str, arrivals: int) -> float:
    """Return the share of all requests that held both targets of their class."""
    window, device, rate = place.split("|")
    cell = Cell(traces, window, device, scheduler)
    trace, targets, seed, window_s = cell.named
    part, fleet = offered(traces, trace, seed, window_s), fleet_of(cell)
    copies = float(rate) * NUM_GPUS / part.rate
    entry = entry_of(scheduler.partition(":")[0])
    return attained(part, copies, arrivals, TARGETS[targets], fleet=fleet, entry=entry)


def summary(shares: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return the mean and the deviation of each scheduler's shares (scheduler -> arrivals -> share), and by how much ours is
    ahead of each other's on the arrivals of both."""
    ours = shares.get(OURS, {})
    found: dict[str, Any] = {name: _spread([*of.values()]) for name, of in shares.items()}
    for name, of in shares.items():
        both = [ours[seed] - value for seed, value in of.items() if seed in ours]
        if both and name != OURS:
            ahead = _spread(both)
            found[name]["ahead"] = ahead["mean"]
            found[name]["ahead_error"] = round(ahead["deviation"] / sqrt(len(both)), 4)
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "mean": round(fmean(values), 4),
        "deviation": round(stdev(values), 4) if len(values) > 1 else 0.0,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    options.add_argument("--at", nargs="*", default=[*PLACES], metavar="WINDOW|DEVICE|RATE")
    options.add_argument("--schedulers", nargs="*", default=[OURS, *OTHERS])
    options.add_argument("--arrivals", type=int, default=5)
    options.add_argument(
        "--hours", type=float, default=24.0, help="Then it stops; go on with the same command."
    )
    args = options.parse_args()
    if args.smoke:
        args.at, args.schedulers, args.arrivals = ["azure-code/mixed/0|base|2"], [OURS, "sarathi"], 2
    until_s = time.monotonic() + args.hours * 3600
    runs: dict[str, Any] = {}
    if args.json and args.json.exists():
        runs = json.loads(args.json.read_text())["runs"]
    for place in args.at:
        for arrivals in range(args.arrivals):
            for name in args.schedulers:
                key = f"{place}|{name}|{arrivals}"
                if runs.get(key, {}).get("code") == code() or time.monotonic() > until_s:
                    continue
                runs[key] = {"share": round(share(args.traces, place, name, arrivals), 4), "code": code()}
                print(f"{runs[key]['share']:.4f}  {key}", flush=True)
                _write(args.json, runs)


def _write(path: Path | None, runs: dict[str, Any]) -> None:
    by_place: dict[str, dict[str, dict[str, float]]] = {}
    for key, run in runs.items():
        window, device, rate, name, seed = key.split("|")
        by_place.setdefault(f"{window}|{device}|{rate}", {}).setdefault(name, {})[seed] = run["share"]
    content = {"places": {place: summary(shares) for place, shares in by_place.items()}, "runs": runs}
    write(path, "benchmarks.goodput_arrivals --traces ../shared/traces", content)


if __name__ == "__main__":
    main()

"""What is gained by learning how fast links are, and by reserving them: requests in time with reports of links, and without.

Four modelled H100s serve Llama-3.1-8B, two of each role or all for either, over links of several speeds. Without reports the
scheduler assumes 2.5 GB/s, and that no bytes go before a request's own. Three windows of the trace, each offered twice over,
targets 2 s and 100 ms."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from baton.bench.traces import read_trace
from benchmarks.report import parser, write
from core.types import Slo
from sim.catalogue.catalogue import GPUS
from sim.catalogued import Fleet, coarse_config
from sim.coarse.coarse_workload import natural_block_tokens
from sim.coarse.world import simulate
from sim.goodput import Window
from sim.outcome_report import attainment, served_coarsely

GPU, MODEL, COPIES = "H100", "llama-3.1-8b", 2.0
SLO = Slo(name="standard", ttft_s=2.0, tpot_s=0.1, hopeless="refuse")
LINKS_GB_PER_S = (0.3, 1.0, 2.5, 50.0)
FLEETS = {"2 prefill, 2 decode": (2, 2, 0), "4 any role": (0, 0, 4)}
STARTS_S = (600.0, 1500.0, 2400.0)


def in_time(window: Window, roles: tuple[int, int, int], gb_per_s: float, learned: bool) -> tuple[float, int]:
    """Return (share of the requests within both targets, hand-overs)."""
    gpu = replace(GPUS[GPU], nic_bytes_per_s=gb_per_s * 1e9)
    prefill, decode, both = roles
    fleet = Fleet(gpu=GPU, model=MODEL, num_prefill=prefill, num_decode=decode, num_both=both, changed=gpu)
    config = replace(coarse_config(fleet, window.block_tokens), reports_links=learned)
    outcome = simulate(config, window.jobs(COPIES, 0, SLO), ends_at=window.duration_s + 30)
    handed_over = sum(line.startswith("place ") and line.split()[2] != "local" for line in outcome.decisions)
    return attainment(served_coarsely(outcome), SLO), handed_over


def measure(trace: Path, seconds: float) -> dict[str, Any]:
    rows = read_trace(trace)
    windows = [Window(rows, start_at, seconds, natural_block_tokens(rows)) for start_at in STARTS_S]
    windows = [window for window in windows if window.rate] or [
        Window(rows, 0.0, seconds, natural_block_tokens(rows))
    ]
    found: dict[str, Any] = {}
    for name, roles in FLEETS.items():
        for gb_per_s in LINKS_GB_PER_S:
            row: dict[str, Any] = {}
            for way, learned in (("assumed", False), ("learned", True)):
                runs = [in_time(window, roles, gb_per_s, learned) for window in windows]
                row[way] = {
                    "in_time": [round(share, 4) for share, _ in runs],
                    "mean": round(fmean(share for share, _ in runs), 4),
                    "handed_over": [count for _, count in runs],
                }
            found.setdefault(name, {})[f"{gb_per_s:g} GB/s"] = row
            print(name, f"{gb_per_s:g} GB/s", {way: row[way]["mean"] for way in row}, flush=True)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("trace", type=Path)
    options.add_argument("--seconds", type=float, default=60.0)
    args = options.parse_args()
    seconds = 5.0 if args.smoke else args.seconds
    setup = {
        "engine": "baton simulate --coarse",
        "fleet": f"four {GPU}, {MODEL}",
        "load": f"{COPIES:g} copies of {seconds:g} s from {STARTS_S} s on",
        "targets": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
    }
    results = measure(args.trace, seconds)
    write(args.json, "benchmarks.goodput links", {"setup": setup, "results": results})


if __name__ == "__main__":
    main()

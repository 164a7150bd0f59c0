"""What shortlists cost against looking at the whole fleet, and what several schedulers cost that tell each other what they place.

    python -m benchmarks.goodput shortlists --traces ../shared/traces [--json FILE]

The coarse simulation of 64 H100s under the same load, one variant after the other for each seed (a window of the trace), reports
100 ms old. The load is one that the scan just about serves; what counts is the share of all requests within both targets, beside
the scan's. Predictions, written first: shortlists lose less than 2 %; of schedulers that learn of each other from reports alone
two lose 1 %, four 3 % (measured: 2.6 and 6 %). Since they tell each other, which takes a millisecond where a report is up to 100
old, less than 2 % is wanted."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from baton.bench.traces import TraceRow, read_trace
from benchmarks.report import parser, write
from core.config.cluster_config import ScheduleConfig
from core.types import Slo
from sim.catalogued import Fleet, coarse_config
from sim.coarse.coarse_workload import Load, jobs, natural_block_tokens
from sim.coarse.multi_scheduler import several
from sim.coarse.world import simulate
from sim.outcome_report import attainment, served_coarsely

NUM_INSTANCES = 64
WINDOW_S, FIRST_S, BETWEEN_S, PATIENCE_S = 10.0, 300.0, 600.0, 30.0
REPORT_INTERVAL_S = 0.1
VARIANTS = {"scan": (1, NUM_INSTANCES), "1 scheduler": (1, 0), "2 schedulers": (2, 0), "4 schedulers": (4, 0)}


@dataclass(frozen=True, slots=True)
class Case:
    trace: str
    slo: Slo
    any_role: bool
    rate: float
    """Requests per second and instance."""


CASES = {
    "conversation, any role": Case(
        "mooncake_fast25_conversation.jsonl.gz",
        Slo(name="standard", ttft_s=2.0, tpot_s=0.1, hopeless="refuse"),
        True,
        1.9,
    ),
    "conversation, pools": Case(
        "mooncake_fast25_conversation.jsonl.gz",
        Slo(name="standard", ttft_s=2.0, tpot_s=0.1, hopeless="refuse"),
        False,
        1.35,
    ),
}


def attained(rows: list[TraceRow], case: Case, seed: int, variant: str, window_s: float) -> float:
    half = NUM_INSTANCES // 2
    roles = (0, 0, NUM_INSTANCES) if case.any_role else (half, half, 0)
    block_tokens, start_at = natural_block_tokens(rows), FIRST_S + seed * BETWEEN_S
    base = sum(start_at <= row.arrival_at < start_at + window_s for row in rows) / window_s
    work = jobs(
        Load(
            rows=rows,
            duration_s=window_s,
            copies=case.rate * NUM_INSTANCES / base,
            start_at=start_at,
            seed=seed,
        ),
        case.slo,
        block_tokens,
    )
    config = coarse_config(
        Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=roles[0], num_decode=roles[1], num_both=roles[2]),
        block_tokens,
    )
    config = replace(config, schedule=ScheduleConfig(report_interval_s=REPORT_INTERVAL_S))
    outcome = simulate(config, work, several(*VARIANTS[variant]), ends_at=window_s + PATIENCE_S)
    return attainment(served_coarsely(outcome), case.slo)


def study(folder: Path, names: list[str], seeds: int, window_s: float) -> Iterator[dict[str, Any]]:
    for name in names:
        case = CASES[name]
        rows = [row for row in read_trace(folder / case.trace) if row.input_tokens < 100_000]
        for seed in range(seeds):
            shares = {
                variant: round(attained(rows, case, seed, variant, window_s), 4) for variant in VARIANTS
            }
            yield {"case": name, "rate": case.rate, "seed": seed, "attained": shares}


def relative(rows: list[dict[str, Any]], variant: str) -> float:
    """To the scan, in the mean over all windows."""
    return fmean(row["attained"][variant] / row["attained"]["scan"] for row in rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    options.add_argument("--cases", nargs="*", default=list(CASES))
    options.add_argument("--seeds", type=int, default=6)
    args = options.parse_args()
    found: list[dict[str, Any]] = []
    seeds, window_s = (1, 1.0) if args.smoke else (args.seeds, WINDOW_S)
    for row in study(args.traces, args.cases, seeds, window_s):
        found.append(row)
        print(json.dumps(row), flush=True)
        summary = {
            name: {
                variant: round(relative([r for r in found if r["case"] == name], variant), 4)
                for variant in VARIANTS
            }
            for name in {row["case"]: None for row in found}
        }
        content = {"relative_to_scan": summary, "windows": found}
        write(args.json, "benchmarks.goodput shortlists --traces ../shared/traces", content)


if __name__ == "__main__":
    main()

"""Five questions to `baton plan`: how soon each is answered, and what the whole trace says of the answer.

    python -m benchmarks.goodput plan_questions --traces ../shared/traces [--only chat ...] [--json FILE]

Each is asked as a user asks it, as a process of its own, whose wall time counts from its start: twice, since others use the
machine, and the sooner counts. Both answers have to be the same. Then every request of the trace,
or every turn of the sessions, is simulated coarsely on the whole fleet of the answer, where the planner has looked at its busiest
windows and of large fleets at a part. A load of several copies has each request that often, at random within a minute. And three
times more with arrivals that are drawn anew: every request comes at random within a minute of its time, and of a part of a load
others do; sessions begin at other times.

Prediction, written first: each is answered within 10 s. Over the whole trace each answer holds what was asked, and by more than
at its peak; the dearest fleet that the planner found too small holds less than the answer. Where a price list makes two GPUs
cheap for different requests a mixed fleet is considered but does not win. Not predicted, and asked after a first run: would one
instance fewer have done?

Prediction for the arrivals drawn anew, written before they were: all answers hold in all three, those whose headroom is 1.3 or
more by as much as in the trace's own order, within 0.1 %. Copies that are drawn apart make lower peaks than the superposed ones
that the planner looks at."""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from baton.bench.traces import TraceRow, read_trace
from benchmarks.goodput.devices import DEEPSEEK_V3
from benchmarks.report import parser, write
from core.types import Slo
from sim.agent_sessions import SessionLoad, is_session_trace, read_sessions
from sim.catalogue.catalogue import CatalogueModel
from sim.catalogue.model_config import model_of
from sim.catalogued import Fleet, mixed_config
from sim.coarse.coarse_workload import Load, jobs, natural_block_tokens
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import simulate
from sim.outcome_report import served_job

ANSWER_S = 10.0
JITTER_S = 60.0
SEEDS = (1, 2, 3)
TRIES = 2
_LOOK_S = 30.0
MODEL = "llama-3.1-8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    trace: str
    gpus: str
    ttft_s: float
    tpot_s: float
    attainment: float
    copies: float = 1.0
    seconds: float = 0.0
    """Within which sessions begin."""
    prices: str = ""
    config: dict[str, Any] | None = None
    """A model's config.json, in place of the catalogue's Llama."""

    @property
    def slo(self) -> Slo:
        return Slo(name="planned", ttft_s=self.ttft_s, tpot_s=self.tpot_s, hopeless="refuse")

    @property
    def read(self) -> CatalogueModel | None:
        return None if self.config is None else model_of(self.config)

    def words(self, traces: str, config: str) -> list[str]:
        """Return what follows `baton`."""
        words = ["plan", "--trace", f"{traces}/{self.trace}", "--gpus", self.gpus]
        words += ["--ttft-ms", f"{self.ttft_s * 1e3:g}", "--tpot-ms", f"{self.tpot_s * 1e3:g}"]
        words += ["--attainment", f"{self.attainment:g}", "--copies", f"{self.copies:g}"]
        words += ["--seconds", f"{self.seconds:g}"] if self.seconds else []
        words += ["--prices", self.prices] if self.prices else []
        return words + (["--model", config] if self.config else [])


ALL = "H100,H200,A100,L40S,B200"
QUESTIONS = {
    "chat on H100": Question(
        trace="azure2023_conv.csv.gz", gpus="H100", ttft_s=1.0, tpot_s=0.05, attainment=0.99, copies=4.0
    ),
    "long prompts": Question(
        trace="mooncake_fast25_conversation.jsonl.gz", gpus=ALL, ttft_s=10.0, tpot_s=0.1, attainment=0.95
    ),
    "agents' sessions": Question(
        trace="agent_lmcache_sessions.jsonl.gz",
        gpus=ALL,
        ttft_s=2.0,
        tpot_s=0.05,
        attainment=0.99,
        copies=3.0,
        seconds=60.0,
    ),
    "quantised MoE on H200": Question(
        trace="servegen_deepseek-r1_1h.csv.gz",
        gpus="H200",
        ttft_s=3.0,
        tpot_s=0.1,
        attainment=0.95,
        copies=0.25,
        config=DEEPSEEK_V3,
    ),
    "mixed GPUs, price list": Question(
        trace="azure2023_code.csv.gz",
        gpus="H100,A100,L40S",
        ttft_s=1.0,
        tpot_s=0.05,
        attainment=0.98,
        copies=4.0,
        prices="H100=2.10,A100=1.20,L40S=0.50",
    ),
}


def ask(question: Question, traces: Path, *more: str) -> dict[str, Any]:
    """Ask in a process of its own. Returns the answer, and how long it took in wall and in processor time."""
    with tempfile.TemporaryDirectory() as folder:
        config, answer = Path(folder) / "config.json", Path(folder) / "answer.json"
        config.write_text(json.dumps(question.config))
        words = [sys.executable, "-m", "baton.cli", *question.words(str(traces), str(config)), *more]
        before, began_at = os.times(), time.perf_counter()
        ran = subprocess.run([*words, "--json", str(answer)], capture_output=True, text=True, check=False)
        took = {"wall_s": round(time.perf_counter() - began_at, 2)}
        after = os.times()
        spent_s = after.children_user + after.children_system - before.children_user - before.children_system
        found = json.loads(answer.read_text()) if answer.exists() else {"finding": ran.stderr, "best": None}
        return found | took | {"processor_s": round(spent_s, 2)}


def fleets_of(question: Question, best: dict[str, Any]) -> list[Fleet]:
    return [
        Fleet(
            gpu=part["gpu"],
            model=MODEL,
            num_prefill=part["prefill"],
            num_decode=part["decode"],
            num_both=part["both"],
            tp=part["tp"],
            pp=part["pp"],
            read=question.read,
        )
        for part in best["parts"]
    ]


def one_fewer(fleets: Sequence[Fleet]) -> list[Fleet] | None:
    """Return the fleet without one instance of its largest part; None where each is the only one in its role."""
    sizes = [fleet.num_prefill + fleet.num_decode + fleet.num_both for fleet in fleets]
    if max(sizes) == 1:
        return None
    role = next(
        role
        for role in ("num_both", "num_prefill", "num_decode")
        if getattr(fleets[sizes.index(max(sizes))], role)
    )
    return [
        replace(fleet, **{role: size - 1}) if number == sizes.index(max(sizes)) else fleet
        for number, (fleet, size) in enumerate(zip(fleets, sizes, strict=True))
    ]


def served(
    question: Question, traces: Path, fleets: Sequence[Fleet], limit: int, seed: int | None = None
) -> dict[str, Any]:
    """Simulate the whole load on a fleet; `limit` > 0: no more than so many rows of the trace. A run ends where more than twice
    as many were late as may miss: it says at most how many could have been in time."""
    work, block_tokens = whole(question, traces / question.trace, limit, seed)
    began_at = time.perf_counter()
    watch = _Watch(question, work)
    outcome = simulate(
        mixed_config(fleets, block_tokens),
        [job for job in work if isfinite(job.request.arrival_at)],
        enough=watch,
    )
    held = sum(served_job(job).holds(question.slo) for job in work)
    return {
        "requests": len(work),
        "attained": round((len(work) - watch.num_late if watch.is_over else held) / len(work), 4),
        "cut_short": watch.is_over,
        "busy_share": round(outcome.busy_share, 3),
        "simulated_in_s": round(time.perf_counter() - began_at, 1),
    }


class _Watch:
    """Looks now and then whether too many are late."""

    def __init__(self, question: Question, work: Sequence[SimulatedRequest]) -> None:
        self._question, self._work, self._next_at = question, work, 0.0
        self.num_late, self.is_over = 0, False

    def __call__(self, now: float) -> bool:
        if now < self._next_at:
            return False
        self._next_at = now + _LOOK_S
        due_at = now - self._question.ttft_s
        late = (job.rejected or job.first_at > now for job in self._work if job.request.arrival_at < due_at)
        self.num_late = sum(map(bool, late))
        self.is_over = self.num_late > 2 * (1 - self._question.attainment) * len(self._work)
        return self.is_over


def whole(
    question: Question, trace: Path, limit: int, seed: int | None
) -> tuple[list[SimulatedRequest], int]:
    """Return all requests, and the tokens of a block. With a seed their arrivals are drawn anew."""
    if is_session_trace(trace):
        sessions = SessionLoad(sessions=read_sessions(trace), start_within_s=question.seconds)
        return sessions.jobs(question.copies, seed or 0, question.slo), sessions.block_tokens
    rows = read_trace(trace)[: limit or None]
    scaled = scale(rows, question.copies, seed)
    load = Load(rows=scaled, duration_s=scaled[-1].arrival_at + 1.0)
    block_tokens = natural_block_tokens(rows)
    return jobs(load, question.slo, block_tokens), block_tokens


def scale(rows: Sequence[TraceRow], copies: float, seed: int | None) -> list[TraceRow]:
    """Return each request so often, the first where it was unless there is a seed; a fraction is kept at random. Copies share no
    prefixes."""
    rng, num_in_place = random.Random(seed or 0), int(seed is None)
    found = [
        replace(
            row,
            arrival_at=max(
                0.0, row.arrival_at + (rng.uniform(-JITTER_S, JITTER_S) / 2 if copy >= num_in_place else 0.0)
            ),
            prefix_ids=tuple(-(copy << 40) - id_ if copy else id_ for id_ in row.prefix_ids),
        )
        for copy in range(-int(-copies // 1))
        for row in rows
        if rng.random() < copies - copy
    ]
    return sorted(found, key=lambda row: row.arrival_at)


def answered(name: str, traces: Path, limit: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the answer, and what the results have of it."""
    question = QUESTIONS[name]
    answers = [ask(question, traces, *(("--effort", "0.2") if limit else ())) for _ in range(TRIES)]
    answer = min(answers, key=lambda answer: answer["wall_s"])
    best = answer["best"]
    row = {
        "question": "baton " + " ".join(question.words("../shared/traces", "config.json")),
        "finding": answer["finding"],
        "wall_s": answer["wall_s"],
        "processor_s": answer["processor_s"],
        "all_wall_s": [one["wall_s"] for one in answers],
        "within_10_s": answer["wall_s"] <= ANSWER_S,
        "same_each_time": all(one["finding"] == answer["finding"] for one in answers),
        "wanted": question.attainment,
        "planned": None,
        "headroom": answer.get("headroom"),
        "windows": answer.get("windows"),
        "trials": len(answer.get("trials", ())),
        "left": answer.get("num_left"),
        "whole": None,
        "redrawn": [],
        "one_fewer": None,
        "cheaper": None,
    }
    if best is not None:
        row["planned"] = {
            "fleet": best["name"],
            "dollars_per_h": best["dollars_per_h"],
            "attained": best["attained"],
        }
    return answer, row


def check(name: str, traces: Path, limit: int, answer: dict[str, Any], row: dict[str, Any]) -> None:
    """Simulate all of the load on the answer."""
    question = QUESTIONS[name]
    row["whole"] = served(question, traces, fleets_of(question, answer["best"]), limit)
    row["holds"] = row["whole"]["attained"] >= question.attainment


def check_redrawn(name: str, traces: Path, limit: int, answer: dict[str, Any], row: dict[str, Any]) -> None:
    question, fleets = QUESTIONS[name], fleets_of(QUESTIONS[name], answer["best"])
    row["redrawn"] = [served(question, traces, fleets, limit, seed) for seed in SEEDS[: 1 if limit else None]]
    row["holds_redrawn"] = all(found["attained"] >= question.attainment for found in row["redrawn"])


def check_less(name: str, traces: Path, limit: int, answer: dict[str, Any], row: dict[str, Any]) -> None:
    """Simulate it on one instance fewer, and on the dearest fleet that was found too small."""
    question, best = QUESTIONS[name], answer["best"]
    if (fewer := one_fewer(fleets_of(question, best))) is not None:
        row["one_fewer"] = served(question, traces, fewer, limit)
    cheaper = [trial for trial in answer["trials"] if trial["dollars_per_h"] < best["dollars_per_h"]]
    if cheaper:
        nearest = max(cheaper, key=lambda trial: trial["dollars_per_h"])
        planned = {"fleet": nearest["name"], "planned_at_most": nearest["attained"]}
        row["cheaper"] = planned | served(question, traces, fleets_of(question, nearest), limit)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    options.add_argument("--only", nargs="*", default=list(QUESTIONS))
    args = options.parse_args()
    limit, names = 200 if args.smoke else 0, args.only[:2] if args.smoke else args.only
    answers, rows = dict[str, Any](), dict[str, Any]()
    for name in names:
        answers[name], row = answered(name, args.traces, limit)
        rows[name] = row
        print(
            f"{name}: {row['wall_s']} s ({row['processor_s']} s of processor time); {row['finding']}",
            flush=True,
        )
    for what in (check, check_redrawn, check_less):
        for name, row in rows.items():
            if answers[name]["best"] is not None:
                what(name, args.traces, limit, answers[name], row)
            shown = {key: row[key] for key in ("whole", "redrawn", "one_fewer", "cheaper") if row[key]}
            print(f"{name}: {shown}", flush=True)
            write(args.json, "benchmarks.goodput plan_questions --traces ../shared/traces", summed_up(rows))


def summed_up(rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "questions": rows,
        "slowest_s": max(row["wall_s"] for row in rows.values()),
        "slowest_processor_s": max(row["processor_s"] for row in rows.values()),
        "num_same": sum(row["same_each_time"] for row in rows.values()),
        "num_held": sum(row.get("holds", False) for row in rows.values()),
        "num_held_redrawn": sum(row.get("holds_redrawn", False) for row in rows.values()),
        "num_asked": len(rows),
    }


if __name__ == "__main__":
    main()

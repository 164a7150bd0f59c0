"""How long the global scheduler takes for one request, by the size of the fleet and by whether its instances have roles.

    python -m benchmarks.decisions TRACE [--json FILE] [--sizes 10,100,1000]

Requests of a trace arrive one after another at instances whose load is random and whose step times are learned; each ends
four arrivals for each instance later. Targets: p50 50 us and p99 250 us at 10,000 instances. Prediction, written first: every
decision looks at the whole fleet, about 1 us an instance: 0.1 ms at 100, 10 ms at 10,000, twice that where the scheduler
also says who computes the prompt."""

import argparse
import json
import random
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.progress import track

from baton.bench.report import machine
from baton.bench.traces import TraceRow, read_trace
from cluster.events import Arrived
from cluster.routing import GlobalScheduler
from core.config import ScheduleConfig
from core.messages import Finished, LoadReport, Place, Register
from core.steps import StepModels
from core.types import Slo
from sim.catalogue import GPUS, MODELS, step_cost
from sim.coarse.learned import learned

BLOCK_TOKENS = 512
RUNNING = 4
"""Requests for each instance that this scheduler has placed and that have not ended."""
NUM_BLOCKS = 800
MAX_BATCH_TOKENS = 8192
MAX_NUM_SEQS = 256


class Fleet:
    def __init__(self, size: int, any_role: bool, rng: random.Random, steps: StepModels) -> None:
        self._steps, self._rng = steps, rng
        self.scheduler = GlobalScheduler(ScheduleConfig())
        self.addresses = [f"i{number}" for number in range(size)]
        self.now = 0.0
        for number, address in enumerate(self.addresses):
            prefills = any_role or number % 2 == 0
            register = Register(
                address, "1", prefills, any_role or not prefills, f"h{number // 8}", BLOCK_TOKENS, NUM_BLOCKS,
                MAX_BATCH_TOKENS, MAX_NUM_SEQS, 131_072, sends=True,
            )  # fmt: skip
            self.scheduler.on(register, self.now)
        self._seq = 0
        for address in self.addresses:
            self.report(address)

    def report(self, address: str) -> None:
        rng, self._seq = self._rng, self._seq + 1
        running = rng.randint(0, 48)
        waiting = rng.choice((0, 0, rng.randint(100, 6000)))
        report = LoadReport(
            address, self._seq, NUM_BLOCKS - 12 * running, waiting, int(waiting > 0), running, 20_000.0, 0.02,
            num_decoding=running, context_tokens=running * 6000, steps=self._steps,
        )  # fmt: skip
        self.scheduler.on(report, self.now)

    def arrive(self, number: int, row: TraceRow) -> float:
        """Seconds that the decision took."""
        self.now += 0.001
        place = Place(
            f"r{number}", 0, row.input_tokens, row.output_tokens, row.prefix_ids, Slo("chat", 2.0, 0.1)
        )
        event = Arrived("f", place)
        started_s = time.perf_counter()
        self.scheduler.on(event, self.now)
        return time.perf_counter() - started_s


def run(rows: list[TraceRow], size: int, any_role: bool, steps: StepModels) -> dict[str, Any]:
    rng = random.Random(size)
    fleet = Fleet(size, any_role, rng, steps)
    times_s: list[float] = []
    open_: deque[str] = deque()
    count = max(60, min(1000, 10_000 // size))
    for number in track(range(count), f"{size} instances, {'any role' if any_role else 'pools'}"):
        times_s.append(fleet.arrive(number, rows[number % len(rows)]))
        open_.append(f"r{number}")
        if len(open_) > RUNNING * size:
            fleet.scheduler.on(Finished(open_.popleft(), 0), fleet.now)
        fleet.report(rng.choice(fleet.addresses))
    ordered = sorted(times_s)
    return {
        "instances": size,
        "any_role": any_role,
        "decisions": count,
        "placed_share": round(1 - fleet.scheduler.num_queued / count, 3),
        "p50_us": round(statistics.median(ordered) * 1e6, 1),
        "p99_us": round(ordered[int(0.99 * len(ordered))] * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sizes", default="10,30,100,300,1000")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row for row in read_trace(args.trace) if row.input_tokens < 300_000]
    steps = learned(step_cost(GPUS["H100"], MODELS["llama-3.1-8b"]), MAX_BATCH_TOKENS, MAX_NUM_SEQS)
    results = [
        run(rows, int(size), any_role, steps) for size in args.sizes.split(",") for any_role in (False, True)
    ]
    for row in results:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.json:
        content = {
            "command": f"python -m benchmarks.decisions {args.trace.name}",
            "machine": machine(),
            "results": results,
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()

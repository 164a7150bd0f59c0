"""Reports name outputs that still run at their marks, in production's engine and in the coarse simulation."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.traces import TraceRow
from cluster.scheduler.recorded_scheduler import RecordedScheduler, read
from core.reports import LoadReport
from core.types import Slo
from sim.catalogue.cost import StepCost
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.world import CoarseConfig, MakeScheduler
from sim.coarse.world import simulate as simulate_coarsely
from sim.simulated_cluster import simulate
from sim.simulated_run import Arrival, SimConfig
from sim.virtual_loop import run_virtual

NUM_OUTPUT, MARKS = 120, [16, 23, 32, 46, 64, 91]
NUM_REQUESTS = 6


def named(path: Path) -> dict[str, list[int]]:
    """Attempt -> the lengths at which reports named its output."""
    found: dict[str, list[int]] = {}
    for item in read(path)[1]:
        if not isinstance(item, str) and isinstance(item[0], LoadReport):
            for key, num_tokens in item[0].grown:
                found.setdefault(key, []).append(num_tokens)
    return found


def test_the_engine_names_each_output_at_each_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recording"
    recorded: MakeScheduler = lambda schedule, log: RecordedScheduler(schedule, path)  # noqa: E731
    monkeypatch.setattr("sim.simulated_cluster.GlobalScheduler", recorded)
    config = SimConfig(num_prefill=1, num_decode=1, step=StepCost())
    arrivals = [
        Arrival(0.1 * i, tuple(range(2, 90 + i)), max_tokens=NUM_OUTPUT, seed=i) for i in range(NUM_REQUESTS)
    ]
    run_virtual(simulate(config, arrivals))
    lengths = list(named(path).values())
    assert lengths == [MARKS] * NUM_REQUESTS


def test_so_does_the_coarse_simulation_also_of_outputs_that_sit_steps_out(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    config = CoarseConfig(num_prefill=0, num_decode=0, num_both=1, num_blocks=2000)
    rows = [
        TraceRow(arrival_at=0.1 * i, input_tokens=300, output_tokens=NUM_OUTPUT) for i in range(NUM_REQUESTS)
    ]
    work = jobs(Load(rows=rows, duration_s=1.0), Slo(ttft_s=2.0, tpot_s=0.1), config.block_tokens)
    high = Slo(name="high", ttft_s=2.0, tpot_s=0.1, priority=1)
    work[-1] = replace(work[-1], request=replace(work[-1].request, slo=high))
    simulate_coarsely(config, work, lambda schedule, _: RecordedScheduler(schedule, path))
    lengths = list(named(path).values())
    assert lengths == [MARKS] * NUM_REQUESTS

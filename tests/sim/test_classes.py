"""Two classes on one fleet, in the coarse simulation: the higher one is served as though it were alone."""

import random
from copy import deepcopy
from dataclasses import replace

from baton.bench.traces import TraceRow
from core.types import Slo
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, simulate

INTERACTIVE = Slo(name="interactive", ttft_s=0.45, tpot_s=0.04, priority=2)
BATCH = Slo(name="batch", ttft_s=3600.0, tpot_s=10.0, priority=-1)
DURATION_S = 12.0
FLEET = CoarseConfig(
    num_prefill=0, num_decode=0, num_both=2, max_batch_tokens=2048, max_num_seqs=256, num_blocks=2000
)


def requests(slo: Slo, rate: float, num_output: int) -> list[SimulatedRequest]:
    rng, rows, at = random.Random(slo.name), list[TraceRow](), 0.0
    while (at := at + rng.expovariate(rate)) < DURATION_S:
        rows.append(TraceRow(arrival_at=at, input_tokens=500, output_tokens=num_output))
    made = jobs(Load(rows=rows, duration_s=DURATION_S), slo, FLEET.block_tokens)
    for job in made:
        job.request = replace(job.request, id=f"{slo.name} {job.request.id}")
    return made


def in_time(job: SimulatedRequest) -> bool:
    slo = job.request.slo
    steady_s = slo.tpot_s * max(1, job.num_output - 1)
    return job.first_at - job.request.arrival_at <= slo.ttft_s and job.last_at - job.first_at <= steady_s


def test_a_higher_class_keeps_its_targets_beside_a_flood_which_gets_the_rest() -> None:
    few, flood = requests(INTERACTIVE, 4.0, 100), requests(BATCH, 40.0, 1000)
    alone = deepcopy(few)
    simulate(FLEET, alone)
    everybody = sorted(few + flood, key=lambda job: job.request.arrival_at)
    simulate(FLEET, everybody, ends_at=2 * DURATION_S)
    assert not any(job.rejected for job in few)
    assert sum(map(in_time, few)) >= 0.95 * sum(map(in_time, alone)) > 0
    beside = deepcopy(flood)
    for job in beside:
        job.num_output, job.rejected, job.first_at, job.last_at = 0, "", float("inf"), float("inf")
    simulate(FLEET, beside, ends_at=2 * DURATION_S)
    assert sum(job.num_output for job in flood) >= 0.8 * sum(job.num_output for job in beside)


def of_any_length(slo: Slo, num_input: int, num_output: int, seed: int) -> list[SimulatedRequest]:
    rng, rows, at = random.Random(seed), list[TraceRow](), 0.0
    while (at := at + rng.expovariate(20.0)) < DURATION_S / 2:
        sizes = max(64, int(rng.expovariate(1 / num_input))), max(2, int(rng.expovariate(1 / num_output)))
        rows.append(TraceRow(arrival_at=at, input_tokens=sizes[0], output_tokens=sizes[1]))
    made = jobs(Load(rows=rows, duration_s=DURATION_S / 2), slo, FLEET.block_tokens)
    for job in made:
        job.request = replace(job.request, id=f"{slo.name} {job.request.id}")
    return made


def test_a_prompt_that_gave_way_in_a_plan_has_no_part_in_it() -> None:
    """It had one, and the simulation stopped when the step ended."""
    fleet = replace(FLEET, num_both=1, num_blocks=120, max_batch_tokens=256)
    everybody = of_any_length(INTERACTIVE, 2000, 200, 180) + of_any_length(BATCH, 300, 100, 181)
    everybody.sort(key=lambda job: job.request.arrival_at)
    simulate(fleet, everybody, ends_at=DURATION_S)
    assert any(job.num_output for job in everybody)

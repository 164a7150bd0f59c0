"""Prompts that nobody could answer in time, taken while the fleet was idle, beside a load of their class, in the coarse
simulation: timely requests are served as though they were alone, and the others are answered."""

import random
from copy import deepcopy
from dataclasses import replace
from math import inf

from baton.bench.traces import TraceRow
from core.types import Slo
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, simulate

CHAT = Slo(name="chat", ttft_s=0.45, tpot_s=0.04)
FLEET = CoarseConfig(
    num_prefill=0, num_decode=0, num_both=2, max_batch_tokens=2048, max_num_seqs=64, num_blocks=1000
)
"""A prompt of 60,000 tokens takes nearly all blocks of an instance."""


def requests(name: str, rows: list[TraceRow]) -> list[SimulatedRequest]:
    made = jobs(Load(rows=rows, duration_s=30.0), CHAT, FLEET.block_tokens)
    for job in made:
        job.request = replace(job.request, id=f"{name} {job.request.id}")
    return made


def timely(rate: float) -> list[SimulatedRequest]:
    rng, rows, at = random.Random(1), list[TraceRow](), 1.0
    while (at := at + rng.expovariate(rate)) < 20.0:
        rows.append(TraceRow(arrival_at=at, input_tokens=400, output_tokens=100))
    return requests("timely", rows)


def in_time(job: SimulatedRequest) -> bool:
    steady_s = CHAT.tpot_s * max(1, job.num_output - 1)
    return job.first_at - job.request.arrival_at <= CHAT.ttft_s and job.last_at - job.first_at <= steady_s


def test_what_nobody_could_answer_in_time_costs_the_others_nothing_and_is_answered() -> None:
    hopeless = requests(
        "hopeless",
        [TraceRow(arrival_at=0.5 + 0.1 * i, input_tokens=60_000, output_tokens=400) for i in range(2)],
    )
    few = timely(30.0)
    alone = deepcopy(few)
    simulate(FLEET, alone)
    simulate(FLEET, sorted(few + hopeless, key=lambda job: job.request.arrival_at))
    assert sum(map(in_time, few)) >= 0.98 * sum(map(in_time, alone)) > 0
    assert all(job.request.slo == CHAT.giving_way() and job.last_at < inf for job in hopeless)
    assert all(job.request.slo == CHAT for job in few)

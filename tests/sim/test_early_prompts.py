"""Fixed roles in the coarse simulation: first tokens come in time although all slots are taken for a while."""

import random
from dataclasses import replace

import pytest

from baton.bench.traces import TraceRow
from core.types import Slo
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, simulate

SLO = Slo(name="chat", ttft_s=0.45, tpot_s=0.04)
FLEET = CoarseConfig(num_prefill=1, num_decode=1, max_num_seqs=16, max_batch_tokens=2048, num_blocks=2000)


def in_time(job: SimulatedRequest) -> bool:
    steady_s = SLO.tpot_s * max(1, job.num_output - 1)
    return job.first_at - job.request.arrival_at <= SLO.ttft_s and job.last_at - job.first_at <= steady_s


def offered(rate: float, burst: int, num_tokens: int = 300) -> list[SimulatedRequest]:
    """A steady load, and a burst in its middle."""
    rng, times = random.Random(0), list[float]()
    while not times or times[-1] < 12.0:
        times.append((times[-1] if times else 0.0) + rng.expovariate(rate))
    times += [8.0 + 0.02 * number for number in range(burst)]
    rows = [TraceRow(arrival_at=one, input_tokens=num_tokens, output_tokens=100) for one in sorted(times)]
    return jobs(Load(rows=rows, duration_s=20.0), SLO, FLEET.block_tokens)


@pytest.mark.parametrize("num_tokens", [20, 300])
def test_a_burst_waits_for_slots_after_its_first_tokens(num_tokens: int) -> None:
    load = offered(rate=8.0, burst=20, num_tokens=num_tokens)
    simulate(FLEET, load)
    assert sum(map(in_time, load)) >= 0.98 * len(load)


def test_preempted_sequences_are_served_beside_those_that_wait_for_a_slot() -> None:
    load = offered(rate=16.0, burst=20)
    simulate(replace(FLEET, num_blocks=110), load)
    assert all(job.num_output == 100 for job in load)

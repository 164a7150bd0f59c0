"""A load that is more than a fleet can serve, and lasts, in the coarse simulation: most of what can be served in time is."""

import random

import pytest

from baton.bench.traces import TraceRow
from core.types import Slo
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, simulate
from sim.cost import StepCost

CHAT = Slo(name="chat", ttft_s=0.5, tpot_s=0.02)
STEP = StepCost(weights_read_s=0.006, kv_token_read_s=2e-7)
FLEET = CoarseConfig(
    num_prefill=0,
    num_decode=0,
    num_both=1,
    step=STEP,
    max_batch_tokens=2048,
    max_num_seqs=256,
    num_blocks=4000,
    asked_tokens=32_768,
)
"""A step takes 20 ms where sequences hold 60,000 tokens together."""


def offered(rate: float, lasts_s: float) -> list[SimulatedRequest]:
    """Outputs are drawn so that few are long and these are most of what runs."""
    rng, rows, at_s = random.Random(3), list[TraceRow](), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < lasts_s:
        length = min(4000, 1 + round(rng.lognormvariate(5.3, 1.0)))
        rows.append(TraceRow(arrival_s=at_s, input_tokens=300, output_tokens=length))
    return jobs(Load(rows=rows, duration_s=lasts_s), CHAT, FLEET.block_tokens)


def is_late(job: SimulatedRequest) -> bool:
    return job.first_s - job.request.arrival_s > CHAT.ttft_s


def is_slow(job: SimulatedRequest) -> bool:
    return job.last_s - job.first_s > CHAT.tpot_s * max(1, job.num_output - 1)


@pytest.mark.parametrize(("rate", "least"), [(17.0, 0.9), (20.0, 0.75)])
def test_some_are_late_so_that_nobody_else_is_and_nobody_is_slow(rate: float, least: float) -> None:
    """Where batches are filled by prompts and half of the mean output, these are 0.74 and 0.26, and the others slow."""
    work = offered(rate, 60.0)
    simulate(FLEET, work)
    assert sum(map(is_slow, work)) <= 0.01 * len(work)
    assert sum(not is_late(job) and not is_slow(job) for job in work) >= least * len(work)

"""What is late after too much has come leaves room, in the coarse simulation, for what comes next."""

import random

import pytest

from baton.bench.traces import TraceRow
from core.types import Slo
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, simulate
from sim.cost import StepCost

CHAT = Slo(name="chat", ttft_s=0.5, tpot_s=0.04)
FLEET = CoarseConfig(
    num_prefill=0,
    num_decode=0,
    num_both=1,
    step=StepCost(weights_read_s=0.008, kv_token_read_s=1e-6),
    max_batch_tokens=2048,
    max_num_seqs=256,
    num_blocks=10_000,
    asked_tokens=32_768,
)
"""A step takes what the class promises with about sixty sequences, which live for about twenty seconds: three come a second."""
FLOOD_S, LASTS_S = 15.0, 120.0


def offered(flood: float, after: float) -> list[SimulatedRequest]:
    """Return so many requests per second for `FLOOD_S`, and then so many."""
    rng, rows, at_s = random.Random(3), list[TraceRow](), 0.0
    while (at_s := at_s + rng.expovariate(flood if at_s < FLOOD_S else after)) < LASTS_S:
        length = min(2000, 1 + round(500 * rng.lognormvariate(-0.1, 0.4)))
        rows.append(TraceRow(arrival_s=at_s, input_tokens=300, output_tokens=length))
    return jobs(Load(rows=rows, duration_s=LASTS_S), CHAT, FLEET.block_tokens)


def is_in_time(job: SimulatedRequest) -> bool:
    tpot_s = (job.last_s - job.first_s) / max(1, job.num_output - 1)
    return job.first_s - job.request.arrival_s <= CHAT.ttft_s and tpot_s <= CHAT.tpot_s


def share_from(start_s: float, work: list[SimulatedRequest]) -> float:
    found = [is_in_time(job) for job in work if job.request.arrival_s >= start_s]
    return sum(found) / len(found)


@pytest.mark.parametrize(("flood", "after"), [(6.0, 2.2), (12.0, 1.5), (12.0, 2.6)])
def test_all_are_in_time_that_come_a_while_after_a_flood(flood: float, after: float) -> None:
    work = offered(flood, after)
    simulate(FLEET, work)
    assert share_from(0.0, work) < 0.95, "in the flood some are late"
    assert share_from(2 * FLOOD_S, work) > 0.98


def test_what_is_late_is_served_where_there_is_room_again() -> None:
    work = offered(6.0, 1.5)
    simulate(FLEET, work)
    assert not any(job.rejected for job in work)

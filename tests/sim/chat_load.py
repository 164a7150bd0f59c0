"""A chat class on one modelled instance: requests at a rate that may change, and which of them were in time."""

import random
from collections.abc import Callable

from baton.bench.traces import TraceRow
from core.types import Slo
from sim.catalogue.cost import StepCost
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig
from sim.outcome_report import served_job


def chat_class(tpot_s: float) -> Slo:
    return Slo(name="chat", ttft_s=0.5, tpot_s=tpot_s)


def one_instance(weights_read_s: float, kv_token_read_s: float, num_blocks: int) -> CoarseConfig:
    return CoarseConfig(
        num_prefill=0,
        num_decode=0,
        num_both=1,
        step=StepCost(weights_read_s=weights_read_s, kv_token_read_s=kv_token_read_s),
        max_batch_tokens=2048,
        max_num_seqs=256,
        num_blocks=num_blocks,
        asked_tokens=32_768,
    )


def offered(
    fleet: CoarseConfig,
    slo: Slo,
    rate: Callable[[float], float],
    output_tokens: Callable[[random.Random], float],
    lasts_s: float,
) -> list[SimulatedRequest]:
    """Return requests that come at random, `rate(seconds)` of them a second, each with a prompt of 300 tokens."""
    rng, rows, at = random.Random(3), list[TraceRow](), 0.0
    while (at := at + rng.expovariate(rate(at))) < lasts_s:
        length = min(4000, 1 + round(output_tokens(rng)))
        rows.append(TraceRow(arrival_at=at, input_tokens=300, output_tokens=length))
    return jobs(Load(rows=rows, duration_s=lasts_s), slo, fleet.block_tokens)


def is_slow(job: SimulatedRequest) -> bool:
    return job.last_at - job.first_at > job.request.slo.tpot_s * max(1, job.num_output - 1)


def share_in_time(work: list[SimulatedRequest]) -> float:
    return sum(served_job(job).holds(job.request.slo) for job in work) / len(work)

"""Instances of the coarse simulation whose sequences lend their blocks while they are ahead of their pace."""

import random
from dataclasses import replace
from math import inf

import pytest

from baton.bench.traces import TraceRow
from core.errors import ConfigError
from core.types import Slo
from sim.catalogued import Fleet, coarse_config, full_config
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, simulate
from sim.cost import StepCost

CHAT = Slo(name="chat", ttft_s=0.5, tpot_s=0.04)
FLEET = CoarseConfig(
    num_prefill=0,
    num_decode=0,
    num_both=1,
    step=StepCost(weights_read_s=0.006, kv_token_read_s=2e-7),
    max_batch_tokens=2048,
    max_num_seqs=256,
    num_blocks=1000,
    asked_tokens=32_768,
)
"""A step takes 19 ms where the pool is full, half of what the class promises."""
WITH_HOST = replace(FLEET, host_blocks=4000)


def offered(rate: float, lasts_s: float = 60.0, output: int = 300) -> list[SimulatedRequest]:
    rng, rows, at_s = random.Random(3), list[TraceRow](), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < lasts_s:
        length = min(4000, 1 + round(output * rng.lognormvariate(0.0, 0.8)))
        rows.append(TraceRow(arrival_s=at_s, input_tokens=300, output_tokens=length))
    return jobs(Load(rows=rows, duration_s=lasts_s), CHAT, FLEET.block_tokens)


def in_time(work: list[SimulatedRequest]) -> float:
    return sum(not is_late(job) and not is_slow(job) for job in work) / len(work)


def is_late(job: SimulatedRequest) -> bool:
    return job.first_s - job.request.arrival_s > CHAT.ttft_s


def is_slow(job: SimulatedRequest) -> bool:
    return job.last_s - job.first_s > CHAT.tpot_s * max(1, job.num_output - 1)


def test_more_are_in_time_where_memory_is_the_limit_and_none_is_slow_for_it() -> None:
    without, lent = offered(15.0), offered(15.0)
    simulate(FLEET, without)
    simulate(WITH_HOST, lent)
    assert in_time(lent) > in_time(without) + 0.05
    assert sum(map(is_slow, lent)) <= sum(map(is_slow, without)) + 0.005 * len(lent)
    assert all(job.last_s < inf or job.rejected for job in lent)


def test_nothing_changes_where_blocks_suffice() -> None:
    without, lent = offered(4.0), offered(4.0)
    simulate(FLEET, without)
    simulate(WITH_HOST, lent)
    assert [(job.first_s, job.last_s) for job in lent] == [(job.first_s, job.last_s) for job in without]


@pytest.mark.parametrize("roles", [(0, 0, 2), (1, 1, 0)], ids=["any role", "fixed roles"])
def test_blocks_agree_with_the_ledger_while_some_sit_out(roles: tuple[int, int, int]) -> None:
    prefill, decode, both = roles
    config = replace(WITH_HOST, num_prefill=prefill, num_decode=decode, num_both=both)
    work = offered(14.0, 30.0)
    simulate(config, work)  # it checks the ledgers at the end
    assert all(job.last_s < inf or job.rejected for job in work)


def test_host_memory_is_of_the_coarse_simulation_alone() -> None:
    fleet = Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=0, num_decode=0, num_both=1, host_bytes=64e9)
    assert coarse_config(fleet, 64).host_blocks == int(64e9 // (131_072 * 64))
    with pytest.raises(ConfigError, match="host memory"):
        full_config(fleet, CHAT)

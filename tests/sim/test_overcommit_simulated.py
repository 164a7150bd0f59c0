"""Instances of the coarse simulation whose sequences pause and give up their blocks while they are ahead of their pace."""

from dataclasses import replace
from math import inf

import pytest

from core.errors import ConfigError
from sim.catalogued import Fleet, coarse_config, full_config
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import simulate
from tests.sim import chat_load
from tests.sim.chat_load import chat_class, is_slow, one_instance, share_in_time

CHAT = chat_class(tpot_s=0.04)
FLEET = one_instance(weights_read_s=0.006, kv_token_read_s=2e-7, num_blocks=1000)
"""A step takes 19 ms where the pool is full, half of what the class promises."""
WITH_HOST = replace(FLEET, host_blocks=4000)


def offered(rate: float, lasts_s: float = 60.0, output: int = 300) -> list[SimulatedRequest]:
    return chat_load.offered(
        FLEET, CHAT, lambda _: rate, lambda rng: output * rng.lognormvariate(0.0, 0.8), lasts_s
    )


@pytest.mark.slow
def test_more_are_in_time_where_memory_is_the_limit_and_none_is_slow_for_it() -> None:
    without, overcommitted = offered(15.0), offered(15.0)
    simulate(FLEET, without)
    simulate(WITH_HOST, overcommitted)
    assert share_in_time(overcommitted) > share_in_time(without) + 0.05
    assert sum(map(is_slow, overcommitted)) <= sum(map(is_slow, without)) + 0.005 * len(overcommitted)
    assert all(job.last_at < inf or job.rejected for job in overcommitted)


def test_nothing_changes_where_blocks_suffice() -> None:
    without, overcommitted = offered(4.0), offered(4.0)
    simulate(FLEET, without)
    simulate(WITH_HOST, overcommitted)
    assert [(job.first_at, job.last_at) for job in overcommitted] == [
        (job.first_at, job.last_at) for job in without
    ]


@pytest.mark.parametrize("roles", [(0, 0, 2), (1, 1, 0)], ids=["any role", "fixed roles"])
def test_blocks_agree_with_the_ledger_while_some_sit_out(roles: tuple[int, int, int]) -> None:
    prefill, decode, both = roles
    config = replace(WITH_HOST, num_prefill=prefill, num_decode=decode, num_both=both)
    work = offered(14.0, 30.0)
    simulate(config, work)  # it checks the ledgers at the end
    assert all(job.last_at < inf or job.rejected for job in work)


def test_host_memory_is_of_the_coarse_simulation_alone() -> None:
    fleet = Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=0, num_decode=0, num_both=1, host_bytes=64e9)
    assert coarse_config(fleet, 64).host_blocks == int(64e9 // (131_072 * 64))
    with pytest.raises(ConfigError, match="host memory"):
        full_config(fleet, CHAT)

"""The very same workers, hand-off and schedulers under the wall clock and under virtual time do the same."""

import asyncio
from dataclasses import replace

from sim.catalogue.cost import StepCost
from sim.fleet_changes import read_failure
from sim.simulated_cluster import simulate
from sim.simulated_run import Arrival, Outcome, SimConfig
from sim.virtual_loop import run_virtual

# Steps and arrivals are tens of milliseconds apart: a wall clock on a busy machine still keeps their order.
CONFIG = SimConfig(
    num_prefill=2,
    num_decode=2,
    step=StepCost(overhead_s=0.03, tokens_per_s=2000.0),
    num_blocks=400,
    overrides={"schedule.local_threshold_tokens": 8, "schedule.report_interval_s": 0.02},
)


def workload(first_tokens: int = 6, more_tokens: int = 1) -> list[Arrival]:
    prompts = [tuple(range(2, 2 + n)) for n in (40, 7, 90, 25, 60, 12)]
    return [
        Arrival(0.25 * i, prompt, max_tokens=first_tokens + more_tokens * i, seed=i)
        for i, prompt in enumerate(prompts)
    ]


def test_wall_and_virtual_clock_agree() -> None:
    short = workload(3, 0)  # so few steps that nothing is learned of their times, in which the clocks differ
    virtual = run_virtual(simulate(CONFIG, short))
    wall = asyncio.run(simulate(CONFIG, short))
    assert virtual.tokens == wall.tokens
    assert virtual.decisions == wall.decisions
    assert any(" loopback:prefill" in line for line in virtual.decisions)
    assert any(" local " in line for line in virtual.decisions)


def test_same_seed_same_log() -> None:
    first, second = (run_virtual(simulate(CONFIG, workload())) for _ in range(2))
    assert first == second


def test_a_killed_instance_changes_no_token() -> None:
    undisturbed = run_virtual(simulate(CONFIG, workload()))
    for victim in ("prefill", "decode"):
        failing = replace(CONFIG, failures=(read_failure(f"{victim}-1@0.4"),))
        disturbed: Outcome = run_virtual(simulate(failing, workload()))
        assert disturbed.tokens == undisturbed.tokens
        assert disturbed.decisions != undisturbed.decisions

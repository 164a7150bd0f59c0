"""Instances that are lost and come back, and pools that follow their load, under virtual time: nobody's answer changes."""

from dataclasses import replace
from math import inf

import pytest

from core.errors import ConfigError
from sim.catalogue.cost import StepCost
from sim.fleet_changes import read_failure
from sim.simulated_cluster import simulate
from sim.simulated_run import Arrival, Outcome, SimConfig
from sim.virtual_loop import run_virtual

FLEET = SimConfig(
    num_prefill=0,
    num_decode=0,
    num_both=2,
    step=StepCost(overhead_s=0.03, tokens_per_s=2000.0),
    num_blocks=400,
)
ONE = replace(FLEET, num_both=1)


def work(count: int, every_s: float, num_prompt: int = 40) -> list[Arrival]:
    return [
        Arrival(every_s * i, tuple(range(2 + 40 * i, 2 + 40 * i + num_prompt)), max_tokens=20, seed=i)
        for i in range(count)
    ]


def run(config: SimConfig, arrivals: list[Arrival]) -> Outcome:
    return run_virtual(simulate(config, arrivals))


def serving(outcome: Outcome, at: float) -> int:
    return sum(life.serving_at <= at < life.ended_at for life in outcome.lives)


def test_what_an_instance_was_answering_goes_on_elsewhere() -> None:
    undisturbed = run(FLEET, work(12, 0.2))
    disturbed = run(replace(FLEET, failures=(read_failure("both-1@1.0"),)), work(12, 0.2))
    assert disturbed.tokens == undisturbed.tokens
    assert [life.ended_at for life in disturbed.lives] == [pytest.approx(1.0), inf]
    assert max(disturbed.last_token_at) > max(undisturbed.last_token_at), "something was computed twice"


def test_until_another_takes_its_place_nobody_is_served() -> None:
    failing = replace(ONE, failures=(read_failure("both-1@1.05-4.0"),))
    outcome = run(failing, work(20, 0.2))
    came_at = [
        at + token_s
        for at, times in zip(outcome.arrived_at, outcome.token_times, strict=True)
        for token_s in times
    ]
    assert not [at for at in came_at if 1.06 < at < 4.0]
    assert all(len(tokens) == 20 for tokens in outcome.tokens), "all waited and were served"
    assert [life.serving_at for life in outcome.lives] == [0.0, pytest.approx(4.0)]


def test_of_a_failure_without_an_instance_nothing_comes() -> None:
    failing = replace(FLEET, failures=(read_failure("both-1@1.0"), read_failure("both-1@2.0")))
    assert len(run(failing, work(12, 0.2)).lives) == 2


SCALED = {
    "scaling.interval_s": 1.0,
    "scaling.decode_max": 4,
    "scaling.calm_s": 5.0,
    "schedule.max_queue_wait_s": 60.0,
}


@pytest.mark.parametrize("cold_start_s", [2.0, 8.0])
def test_a_pool_grows_under_load_after_a_cold_start_and_shrinks_when_it_is_over(cold_start_s: float) -> None:
    """For 20 s prompts come 2.5 times as fast as one instance computes them, then almost none."""
    rush = work(100, 0.2, num_prompt=1000)
    calm = [replace(one, at=20.0 + 2.0 * i, seed=1000 + i) for i, one in enumerate(work(30, 2.0))]
    outcome = run(replace(ONE, cold_start_s=cold_start_s, overrides=SCALED), rush + calm)
    grown = [life for life in outcome.lives if life.asked_at > 0]
    assert grown
    assert all(life.serving_at == pytest.approx(life.asked_at + cold_start_s, abs=0.1) for life in grown)
    assert serving(outcome, 20.0) > 1
    assert serving(outcome, 79.0) == 1
    assert all(tokens for tokens in outcome.tokens), "draining loses nobody"
    sizes_stay = run(replace(ONE, overrides=SCALED), rush + calm)
    assert sum(outcome.first_token_at) < sum(sizes_stay.first_token_at)


def test_a_lost_instance_of_a_sized_pool_is_replaced_after_a_cold_start() -> None:
    failing = replace(ONE, failures=(read_failure("both-1@1.05"),), cold_start_s=3.0, overrides=SCALED)
    outcome = run(failing, work(10, 0.5))
    assert outcome.lives[1].asked_at == pytest.approx(1.05)
    assert outcome.lives[1].serving_at == pytest.approx(4.05)
    assert all(len(tokens) == 20 for tokens in outcome.tokens)


@pytest.mark.parametrize("text", ["decode-1", "decode-0@1", "encode-1@3", "decode-1@9-3", "decode-1@x"])
def test_what_is_no_failure_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="decode-1@120"):
        read_failure(text)

"""Hybrids in the coarse simulation: a sequence's recurrent state takes blocks, and each step reads and writes it."""

from dataclasses import replace

import pytest

from baton.bench.traces import TraceRow
from core.errors import ConfigError
from core.types import Slo
from sim.catalogue.catalogue import GPUS, MODELS, num_blocks, step_cost
from sim.catalogue.cost import StepCost
from sim.catalogued import Fleet, engine_of, full_config
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.world import CoarseConfig, simulate

SLO = Slo(name="t", ttft_s=1e9, tpot_s=1e9)
GPU, PLAIN = GPUS["H100"], MODELS["llama-3.1-8b"]
HYBRID = replace(PLAIN, kv_token_values=16_384, state_bytes=100e6)
STEP = StepCost(overhead_s=0.0, tokens_per_s=1e9, weights_read_s=0.01, kv_token_read_s=0.0)


def ends_s(config: CoarseConfig) -> float:
    """Return when the last of ten ends that come at once. Each takes one block to begin with, and a second one soon."""
    rows = [TraceRow(arrival_at=0.0, input_tokens=60, output_tokens=60) for _ in range(10)]
    work = jobs(Load(rows=rows, duration_s=1.0), SLO, 64)
    simulate(config, work)
    return max(job.last_at for job in work)


def test_as_many_run_at_once_as_their_states_have_room_for() -> None:
    plain = CoarseConfig(num_prefill=0, num_decode=0, num_both=1, block_tokens=64, num_blocks=36, step=STEP)
    at_once = ends_s(plain)
    assert at_once == pytest.approx(60 * 0.01, rel=0.1)
    assert ends_s(replace(plain, state_blocks=10)) == pytest.approx(5 * at_once, rel=0.25), (
        "two at a time, or three"
    )


def test_a_step_reads_and_writes_the_state_of_each_of_its_sequences() -> None:
    plain, hybrid = (step_cost(GPU, model) for model in (replace(HYBRID, state_bytes=0.0), HYBRID))
    moved_s = 2 * 100e6 / (0.8 * GPU.memory_bytes_per_s)
    for count in (1, 64):
        added_s = hybrid.step_s(count, 0, 0, count) - plain.step_s(count, 0, 0, count)
        assert added_s == pytest.approx(count * moved_s)
    halved = step_cost(GPU, HYBRID, tp=2)
    assert halved.memory_s(1, 0, 1) == pytest.approx(hybrid.memory_s(1, 0, 1) / 2)


def test_what_bounds_an_instance_knows_of_states() -> None:
    fleet = Fleet(gpu="H100", model="own", num_prefill=0, num_decode=0, num_both=1, read=HYBRID)
    bound = engine_of(fleet, 64)
    assert bound.state_tokens * HYBRID.kv_token_bytes == pytest.approx(100e6, rel=0.05)
    assert bound.kv_tokens == 64 * num_blocks(GPU, HYBRID, 64)
    with pytest.raises(ConfigError):
        num_blocks(GPU, replace(HYBRID, state_bytes=80e9), 64)


def test_the_full_simulation_refuses_states() -> None:
    fleet = Fleet(gpu="H100", model="own", num_prefill=0, num_decode=0, num_both=1, read=HYBRID)
    with pytest.raises(ConfigError, match="use the coarse one"):
        full_config(fleet, SLO)

"""Sessions in closed loop: a turn comes after the one before it has ended, and finds its prompt cached."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from core.types import Slo
from sim.agent_sessions import SessionLoad, read_sessions
from sim.baselines.table import entry_of
from sim.catalogued import Fleet
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, production, simulate
from sim.goodput import attained
from tests.benchmarks.small_traces import write_traces

TIGHT, LOOSE = Slo(name="tight", ttft_s=1e-6, tpot_s=1e-6), Slo(name="loose", ttft_s=100.0, tpot_s=10.0)
CONFIG = CoarseConfig(num_prefill=0, num_decode=0, num_both=1, num_blocks=1000)


@pytest.fixture
def load(tmp_path: Path) -> SessionLoad:
    write_traces(tmp_path)
    return SessionLoad(
        sessions=read_sessions(tmp_path / "agent_lmcache_sessions.jsonl.gz"), start_within_s=5.0
    )


def openers(work: list[SimulatedRequest]) -> list[SimulatedRequest]:
    return [job for job in work if job.request.arrival_s < inf]


def test_a_turn_arrives_its_gap_after_the_last_token_of_the_one_before(load: SessionLoad) -> None:
    work = load.jobs(2.0, 0, LOOSE)
    assert (len(work), len(openers(work))) == (24, 8)
    simulate(CONFIG, openers(work))
    assert all(job.num_output == job.max_tokens for job in work)
    for job in work:
        if job.then is not None:
            assert job.then.request.arrival_s == pytest.approx(job.last_s + 1.0)


def test_a_refused_turn_does_not_end_its_session(load: SessionLoad) -> None:
    work = load.jobs(1.0, 0, TIGHT)
    simulate(CONFIG, openers(work), entry_of("sarathi+refuse").make)
    refused = [job for job in work if job.rejected]
    assert any(job.then is not None for job in refused)
    assert all(job.rejected or job.num_output == job.max_tokens for job in work), "each turn had its turn"


def test_what_a_turn_goes_on_from_is_cached_in_its_own_copy_alone(load: SessionLoad) -> None:
    work = load.jobs(2.0, 0, LOOSE)
    for job in work:
        if job.then is not None:
            assert job.then.hashes[: len(job.hashes)] == job.hashes
    first = [job.hashes[0] for job in openers(work)]
    assert len(set(first)) == len(first)


def test_each_class_is_held_to_its_own_targets(load: SessionLoad) -> None:
    fleet = Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=0, num_decode=0, num_both=1)
    entry = replace(entry_of("baton"), make=production)
    assert attained(load, 1.0, 0, (TIGHT, LOOSE), fleet=fleet, entry=entry) == 0.5
    assert attained(load, 1.0, 0, LOOSE, fleet=fleet, entry=entry) == 1.0

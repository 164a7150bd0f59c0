"""Sessions in closed loop: a turn comes after the one before it has ended, and finds its prompt cached."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.types import Slo
from sim.agent_sessions import SessionLoad, is_session_trace, read_sessions
from sim.baselines.table import entry_of
from sim.catalogue.cost import StepCost
from sim.catalogued import Fleet
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, production, simulate
from sim.goodput import attained
from sim.simulated_cluster import simulate as simulate_in_full
from sim.simulated_run import SimConfig
from sim.virtual_loop import run_virtual
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
    return [job for job in work if job.request.arrival_at < inf]


def test_a_turn_arrives_its_gap_after_the_last_token_of_the_one_before(load: SessionLoad) -> None:
    work = load.jobs(2.0, 0, LOOSE)
    assert (len(work), len(openers(work))) == (24, 8)
    simulate(CONFIG, openers(work))
    assert all(job.num_output == job.max_tokens for job in work)
    for job in work:
        if job.then is not None:
            assert job.then.request.arrival_at == pytest.approx(job.last_at + 1.0)


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


SLOW = StepCost(overhead_s=0.002, tokens_per_s=2000.0)
FULL = SimConfig(num_prefill=0, num_decode=0, num_both=1, num_blocks=4000, step=SLOW)


def written(path: Path, turns: list[dict[str, object]]) -> SessionLoad:
    path.write_text("".join(json.dumps({"session_id": "a", **turn}) + "\n" for turn in turns))
    assert is_session_trace(path)
    return SessionLoad(sessions=read_sessions(path), start_within_s=1.0)


def test_in_full_a_turn_comes_its_gap_after_the_answer_before(load: SessionLoad) -> None:
    work = load.arrivals(2.0, 0)
    outcome = run_virtual(simulate_in_full(FULL, work))
    assert len(work) == 24
    for number, arrival in enumerate(work):
        if (before := arrival.follows) is not None:
            ended_at = outcome.arrived_at[before] + outcome.last_token_at[before]
            assert outcome.arrived_at[number] == pytest.approx(ended_at + 1.0)


@pytest.mark.parametrize("room", [True, False])
def test_a_turn_finds_the_answer_before_where_its_prompt_has_room_for_it(tmp_path: Path, room: bool) -> None:
    """1000 tokens of prompt and 900 of answer are in the second prompt of 2000, and not in one of 1500."""
    num_second = 2000 if room else 1500
    load = written(
        tmp_path / "own.jsonl",
        [
            {"turn": 0, "input_length": 1000, "output_length": 900},
            {"turn": 1, "gap_ms": 250, "input_length": num_second, "output_length": 5},
        ],
    )
    missing_s = (num_second - (1900 if room else 1000)) / SLOW.tokens_per_s
    block_s = 2 * 64 / SLOW.tokens_per_s
    outcome = run_virtual(simulate_in_full(FULL, load.arrivals(1.0, 0)))
    assert missing_s < outcome.first_token_at[1] < missing_s + block_s
    work = load.jobs(1.0, 0, LOOSE)
    simulate(replace(CONFIG, step=SLOW, block_tokens=64), openers(work))
    assert work[1].request.arrival_at == pytest.approx(work[0].last_at + 0.25)
    assert missing_s < work[1].first_at - work[1].request.arrival_at < missing_s + block_s


def test_an_answer_that_was_in_a_prompt_stays_in_those_that_go_on_from_it(tmp_path: Path) -> None:
    turns = [{"turn": i, "gap_ms": 0, "input_length": 500 + 1000 * i, "output_length": 400} for i in range(4)]
    work = written(tmp_path / "own.jsonl", list(turns)).arrivals(1.0, 0)
    outcome = run_virtual(simulate_in_full(FULL, work))
    for number in (1, 2, 3):
        assert outcome.first_token_at[number] < (600 + 2 * 64) / SLOW.tokens_per_s, (
            "all but the new text is cached"
        )


def test_what_holds_no_sessions_is_said(tmp_path: Path) -> None:
    for turn in ({"turn": 0}, {"turn": 0, "input_length": 3, "output_length": "x"}):
        with pytest.raises(ConfigError, match="does not hold sessions"):
            written(tmp_path / "own.jsonl", [turn])
    with pytest.raises(ConfigError, match="cannot read"):
        is_session_trace(tmp_path / "absent.jsonl")

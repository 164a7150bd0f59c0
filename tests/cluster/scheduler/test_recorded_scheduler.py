"""A recorded event log, replayed, gives the decision log byte for byte; a changed one does not."""

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton import LLM, SamplingParams
from baton.bench.recorded_trace import write_trace
from baton.bench.traces import read_trace
from baton.cli.main import app
from cluster.scheduler.recorded_scheduler import make_scheduler, replay
from cluster.scheduler.scheduler_events import PeerLost, Tick
from core.config.cluster_config import ScheduleConfig
from core.errors import ConfigError
from core.messages import Finished
from tests.cluster.scheduler.routing_world import ask, instance, report


def record(path: Path) -> None:
    scheduler = make_scheduler(ScheduleConfig(record_path=str(path)))
    now = 0.0
    for address, role in (("d1", "d"), ("d2", "d"), ("p1", "p")):
        scheduler.on(instance(address, role), now)
    for number in range(60):
        now += 0.05
        scheduler.on(ask(f"r{number}", 100 + 40 * (number % 30), prefix=number % 3), now)
        scheduler.on(report(("d1", "d2", "p1")[number % 3], cache_added=(number,), seq=number), now)
        if number % 4 == 3:
            scheduler.on(Finished(f"r{number - 3}", 0), now)
    scheduler.on(PeerLost("p1"), now)
    scheduler.on(Tick(), now + 100)


def test_a_replay_decides_the_same(tmp_path: Path) -> None:
    record(tmp_path / "events")
    recorded, decided = replay(tmp_path / "events")
    assert len(recorded) > 50
    assert "\n".join(recorded).encode() == "\n".join(decided).encode()
    ran = CliRunner().invoke(app, ["replay", str(tmp_path / "events"), "--log", str(tmp_path / "log")])
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "log").read_text().splitlines() == recorded


def test_a_recording_cut_short_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    record(tmp_path / "events")
    data = (tmp_path / "events").read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    recorded, decided = replay(tmp_path / "cut")
    assert 10 < len(recorded) < 50
    assert decided[: len(recorded)] == recorded


def test_the_recording_of_a_scheduler_that_has_ended_is_kept_when_the_next_one_starts(tmp_path: Path) -> None:
    record(tmp_path / "events")
    make_scheduler(ScheduleConfig(record_path=str(tmp_path / "events")))
    recorded, decided = replay(tmp_path / "events.before")
    assert len(recorded) > 50
    assert decided == recorded


def test_a_disk_that_fails_ends_the_recording_and_not_the_scheduler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events"
    scheduler = make_scheduler(ScheduleConfig(record_path=str(path)))
    scheduler.on(instance("d1", "d"), 0.0)
    path.rename(tmp_path / "so far")
    path.mkdir()  # nothing can be written there
    for number in range(3):
        placed = scheduler.on(ask(f"r{number}", 100), 0.1)
        assert [send.to for send in placed]
    assert caplog.text.count("nothing more is recorded") == 1


def test_a_changed_recording_is_noticed(tmp_path: Path) -> None:
    record(tmp_path / "events")
    data = (tmp_path / "events").read_bytes()
    (tmp_path / "changed").write_bytes(data.replace(b"place r7#0", b"place r8#0", 1))
    ran = CliRunner().invoke(app, ["replay", str(tmp_path / "changed")])
    assert ran.exit_code == 1
    assert "r8#0" in ran.output
    (tmp_path / "other").write_bytes(b"\x01\x02")
    with pytest.raises(ConfigError, match="no recording"):
        replay(tmp_path / "other")


def test_a_live_cluster_is_replayed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The real engine under the wall clock: no two runs are timed alike, yet the replay has every decision."""
    caplog.set_level(logging.ERROR)
    path = tmp_path / "events"
    with LLM("embedded", prefill_instances=1, decode_instances=2, schedule__record_path=str(path)) as llm:
        prompts = [[1 + (i * j) % 400 for j in range(40 + 30 * i)] for i in range(6)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8), progress=False)
    recorded, decided = replay(path)
    assert sum(line.startswith("place") for line in recorded) == 6
    assert decided == recorded


def test_a_recording_becomes_a_trace_of_what_it_served(tmp_path: Path) -> None:
    recording, trace, figures = tmp_path / "events", tmp_path / "day.jsonl", tmp_path / "figures.json"
    prompts = [[7] * 64 + [100 + number] * (8 * number) for number in range(5)]
    with LLM("embedded", prefill_instances=0, schedule__record_path=str(recording)) as llm:
        for prompt in prompts:
            llm.generate(
                [prompt], SamplingParams(temperature=0.0, max_tokens=6, min_tokens=6), progress=False
            )
    ran = CliRunner().invoke(app, ["replay", str(recording), "--trace", str(trace)])
    assert ran.exit_code == 0, ran.output
    assert "5 requests in" in ran.output
    rows = read_trace(trace)
    assert [row.input_tokens for row in rows] == [len(prompt) for prompt in prompts]
    assert [row.output_tokens for row in rows] == [6] * 5
    assert [row.arrival_at for row in rows] == sorted(row.arrival_at for row in rows)
    assert {row.prefix_block_tokens for row in rows} == {16}
    assert {row.prefix_ids[:4] for row in rows} == {(0, 1, 2, 3)}, "what they have in common"
    fleet = ["--both", "1", "--prefill", "0", "--decode", "0"]
    ran = CliRunner().invoke(app, ["simulate", "--trace", str(trace), *fleet, "--json", str(figures)])
    assert ran.exit_code == 0, ran.output
    assert json.loads(figures.read_text())["num_offered"] == 5


def test_a_recording_without_an_answer_is_no_trace(tmp_path: Path) -> None:
    make_scheduler(ScheduleConfig(record_path=str(tmp_path / "events")))
    with pytest.raises(ConfigError, match="no request"):
        write_trace(tmp_path / "events", tmp_path / "trace")

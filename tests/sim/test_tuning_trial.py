"""`baton replay --tuning`: what another tuning would have changed of recorded traffic."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.tuning_trial import try_tuning
from cluster.scheduler.recorded_scheduler import RecordedScheduler, replay
from core.config.cluster_config import ScheduleConfig, load
from core.errors import ConfigError
from core.scheduler_tuning import DEFAULT_TUNING
from core.types import STANDARD, Slo
from sim.catalogue.cost import StepCost
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.world import CoarseConfig, simulate
from sim.outcome_report import attainment, served_job
from tests.sim.random_rows import BLOCK, random_rows

STEP = StepCost(
    overhead_s=0.004, tokens_per_s=4000.0, weights_read_s=0.006, kv_token_read_s=2e-7, pair_s=2e-9
)
CLASSES = (Slo(name="chat", ttft_s=0.25, tpot_s=0.02, priority=1), Slo(name="slow", ttft_s=4.0, tpot_s=0.2))


def record(path: Path, **config: object) -> dict[str, float]:
    """Record 120 requests on four instances, and return what share of each class was in time then."""
    schedule = ScheduleConfig(record_path=str(path), **config)  # type: ignore[arg-type]
    fleet = CoarseConfig(
        num_prefill=1,
        num_decode=1,
        num_both=2,
        block_tokens=BLOCK,
        num_blocks=1500,
        step=STEP,
        schedule=schedule,
    )
    work = jobs(Load(rows=random_rows(3, 120, 26.0), duration_s=60.0), CLASSES, BLOCK)
    simulate(fleet, work, lambda config, log: RecordedScheduler(config, path))
    found: dict[str, float] = {}
    for slo in CLASSES:
        found[slo.name] = attainment(
            [served_job(job) for job in work if job.request.slo.name == slo.name], STANDARD
        )
    return found


def test_a_recording_is_simulated_as_it_was(tmp_path: Path) -> None:
    """Two of the 60 requests of a class may end otherwise, since step times are those that were learned."""
    happened = record(tmp_path / "events")
    found = {
        one.name: one for one in try_tuning(tmp_path / "events", {"risk_weight": DEFAULT_TUNING.risk_weight})
    }
    assert 0.3 < happened["chat"] < 0.98
    for name, share in happened.items():
        assert found[name].now_share == pytest.approx(share, abs=0.034)
        assert found[name].then_share == found[name].now_share
        assert found[name].num_elsewhere == 0


def test_another_tuning_places_elsewhere_and_what_it_brings_is_simulated(tmp_path: Path) -> None:
    record(tmp_path / "events")
    ran = CliRunner().invoke(
        app,
        [
            "replay",
            str(tmp_path / "events"),
            "--tuning",
            "alike=0",
            "--tuning",
            "risk_weight=0",
            "--json",
            str(tmp_path / "json"),
        ],
    )
    assert ran.exit_code == 0, ran.output
    found = {one["name"]: one for one in json.loads((tmp_path / "json").read_text())}
    assert found.keys() == {"chat", "slow"}
    assert sum(one["num_elsewhere"] for one in found.values()) > 0
    assert any(one["then_share"] != one["now_share"] for one in found.values())


def test_a_live_shadow_writes_the_same_without_changing_a_decision(tmp_path: Path) -> None:
    assert record(tmp_path / "plain") == record(tmp_path / "shadowed", shadow_tuning={"alike": 0.0})
    plain, _ = replay(tmp_path / "plain")
    shadowed, again = replay(tmp_path / "shadowed")
    assert [line for line in shadowed if not line.startswith("shadow")] == plain
    assert shadowed == again
    assert shadowed == replay(tmp_path / "plain", {"alike": 0.0})[1]


def test_a_constant_of_the_configuration_decides(tmp_path: Path) -> None:
    record(tmp_path / "plain")
    record(tmp_path / "tuned", tuning={"alike": 0.0})
    assert replay(tmp_path / "plain")[0] != replay(tmp_path / "tuned")[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("nothing=1", "'nothing' is no constant of placement"),
        ("alike=2", r"alike is on \(1\) or off \(0\), not 2"),
        ("max_passed=1.5", "max_passed is a whole number"),
        ("risk_weight=-1", "risk_weight must be at least 0"),
        ("risk_weight", "'risk_weight' is no NAME=NUMBER"),
    ],
)
def test_what_is_no_constant_is_refused(tmp_path: Path, changes: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(None, {}, {"schedule.tuning": [changes]})
    ran = CliRunner().invoke(app, ["replay", str(tmp_path / "events"), "--tuning", changes])
    assert ran.exit_code != 0
    assert isinstance(ran.exception, ConfigError)


def test_a_shadow_needs_a_file_for_what_it_would_decide() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.record_path: name a file"):
        load(None, {}, {"schedule.shadow_tuning": ["alike=0"]})

"""`baton simulate` on a small trace: the same figures with and without pictures, and plain words for what it cannot do."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from matplotlib import image

from baton.bench.traces import read_trace
from baton.cli.simulate import simulate
from baton.simulation import Study, TraceWorkload
from baton.simulation_pictures import holds_until, why_missed
from core.config.cluster_config import load
from core.errors import ConfigError
from core.types import Slo
from sim.catalogued import Fleet
from sim.outcome_report import ServedRequest, attainment


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 500 * i, "input_length": 800, "output_length": 30, "hash_ids": [0, i + 1]}
        for i in range(16)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("coarse", [True, False])
def test_the_report_has_every_picture(trace: Path, tmp_path: Path, coarse: bool) -> None:
    report, figures = tmp_path / "report", tmp_path / "figures.json"
    simulate(trace, seconds=9.0, coarse=coarse, both=1, report=report, sweep="1,2", output=figures)
    assert sorted(path.name for path in report.iterdir()) == ["attainment.png", "goodput.png", "timeline.png"]
    for path in report.iterdir():
        assert image.imread(path).std() > 0.05, f"{path} is blank"
    assert json.loads(figures.read_text())["num_finished"] == 16


def test_without_a_sweep_there_is_no_goodput_over_rate(trace: Path, tmp_path: Path) -> None:
    simulate(trace, seconds=9.0, coarse=True, prefill=0, decode=0, both=2, report=tmp_path / "report")
    assert not (tmp_path / "report" / "goodput.png").exists()


def test_a_sweep_goes_on_until_the_targets_break(trace: Path) -> None:
    study = Study(
        workload=TraceWorkload(read_trace(trace), 9.0),
        fleet=Fleet(gpu="L40S", model="llama-3.1-8b", num_prefill=0, num_decode=0, num_both=1),
        slo=Slo(name="t", ttft_s=1.0, tpot_s=0.05),
        seconds=9.0,
        seed=0,
        coarse=True,
        config=load(None, {}, {}),
    )
    runs = study.sweep([1, 2])
    rates = sorted(runs)
    shares = [attainment(runs[rate], study.slo) for rate in rates]
    assert len(rates) > 2
    assert shares[0] == 1.0
    assert min(shares[:-1]) >= 0.9 > shares[-1]
    assert holds_until(rates, shares, 0.9).startswith("90% hold both targets at")
    assert "perhaps" in holds_until(rates[:2], shares[:2], 0.9)
    assert "already" in holds_until(rates[-1:], shares[-1:], 0.9)


def test_a_fleet_that_changes_is_reported(trace: Path, tmp_path: Path) -> None:
    figures, config = tmp_path / "figures.json", tmp_path / "baton.yaml"
    config.write_text("scaling: {decode_max: 2}\n")
    simulate(
        trace,
        seconds=9.0,
        prefill=0,
        decode=0,
        both=1,
        fail=["both-1@3"],
        autoscale=True,
        cold_start_s=2.0,
        config=config,
        output=figures,
    )
    found = json.loads(figures.read_text())["instances"]
    assert (found["started"], found["ended"]) == (1, 1)
    assert found["hours"] == pytest.approx(8.0 / 3600, rel=0.2)


def test_clients_are_reported_apart(tmp_path: Path) -> None:
    path, figures = tmp_path / "trace.csv", tmp_path / "figures.json"
    rows = [f"{i * 0.5},300,10,{'a' if i % 3 else 'b'}\n" for i in range(12)]
    path.write_text("arrival_s,input_tokens,output_tokens,client\n" + "".join(rows))
    simulate(path, seconds=9.0, coarse=True, output=figures)
    tenants = json.loads(figures.read_text())["tenants"]
    assert {name: own["num_offered"] for name, own in tenants.items()} == {"a": 8, "b": 4}


def test_what_cannot_be_done_is_refused(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--report"):
        simulate(trace, coarse=True, sweep="1,2")
    for wrong in ("0", "1,x"):
        with pytest.raises(ConfigError, match="whole numbers"):
            simulate(trace, coarse=True, sweep=wrong, report=tmp_path)
    with pytest.raises(ConfigError, match="no instance decodes"):
        simulate(trace, coarse=True, decode=0)
    with pytest.raises(ConfigError, match="neither failures nor autoscaling"):
        simulate(trace, coarse=True, fail=["decode-1@3"])
    with pytest.raises(ConfigError, match="has 1 of that role"):
        simulate(trace, fail=["decode-2@3"])
    with pytest.raises(ConfigError, match="--prefill 0"):
        simulate(trace, both=1, autoscale=True)


def test_the_title_says_what_the_requests_miss_that_miss_a_target() -> None:
    slo, patient = Slo(name="s", ttft_s=1.0, tpot_s=0.1), Slo(name="p", ttft_s=9.0, tpot_s=0.1)
    in_time = ServedRequest(0.0, ttft_s=0.5, e2e_s=1.4, num_output=10)
    late = ServedRequest(0.0, ttft_s=2.0, e2e_s=2.9, num_output=10)
    slow = ServedRequest(0.0, ttft_s=0.5, e2e_s=9.5, num_output=10)
    refused = ServedRequest(0.0, ttft_s=inf, e2e_s=inf, num_output=0)
    of_its_class = replace(late, slo=patient)
    assert why_missed([in_time, of_its_class], slo) == "100.0% hold both targets"
    said = why_missed([in_time, of_its_class, late, slow, refused], slo)
    assert said == "40.0% hold both targets (20.0% unanswered, 20.0% late, 20.0% slow)"

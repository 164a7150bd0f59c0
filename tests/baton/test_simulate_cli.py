"""`baton simulate` on a small trace: the same figures with and without pictures, and plain words for what it cannot do."""

import json
from pathlib import Path

import pytest
from matplotlib import image

from baton.cli.simulate import simulate
from core.errors import ConfigError


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


def test_what_cannot_be_done_is_refused(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--report"):
        simulate(trace, coarse=True, sweep="1,2")
    for wrong in ("0", "1,x"):
        with pytest.raises(ConfigError, match="whole numbers"):
            simulate(trace, coarse=True, sweep=wrong, report=tmp_path)
    with pytest.raises(ConfigError, match="no instance decodes"):
        simulate(trace, coarse=True, decode=0)

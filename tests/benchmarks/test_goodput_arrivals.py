"""What `benchmarks.goodput_arrivals` says of shares at one rate, and which runs it makes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goodput_arrivals import main, summary
from tests.benchmarks.small_traces import write_traces


def test_others_are_compared_on_the_same_arrivals() -> None:
    found = summary({
        "baton": {"0": 0.9, "1": 0.8, "2": 1.0},
        "sarathi": {"0": 0.8, "1": 0.8},
        "mooncake": {"7": 0.5},
    })  # fmt: skip
    assert found["baton"] == {"mean": 0.9, "deviation": 0.1}
    assert found["sarathi"] == {"mean": 0.8, "deviation": 0.0, "ahead": 0.05, "ahead_error": 0.05}
    assert found["mooncake"] == {"mean": 0.5, "deviation": 0.0}


def test_runs_of_the_same_code_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_traces(tmp_path)
    out, place = tmp_path / "out.json", "azure-code/mixed/0|base|2"

    def runs(arrivals: int) -> dict[str, Any]:
        words = ["--at", place, "--schedulers", "sarathi", "--arrivals", str(arrivals), "--json", str(out)]
        monkeypatch.setattr(sys, "argv", ["goodput_arrivals", "--traces", str(tmp_path), *words])
        main()
        return json.loads(out.read_text())["runs"]

    first = runs(1)
    assert 0 <= first[f"{place}|sarathi|0"]["share"] <= 1
    first[f"{place}|sarathi|0"]["share"] = 0.123
    out.write_text(json.dumps({"runs": first}))
    both = runs(2)
    assert both[f"{place}|sarathi|0"]["share"] == 0.123
    other = both[f"{place}|sarathi|1"]
    out.write_text(json.dumps({"runs": {f"{place}|sarathi|1": {**other, "share": 0.123, "code": "other"}}}))
    assert runs(2)[f"{place}|sarathi|1"] == other

"""What the study of other loads and devices runs, and of which code its cells are."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goodput.loads import Cell
from benchmarks.goodput.search import code, deciding_files
from benchmarks.goodput.wide import bound_of, main
from tests.benchmarks.small_traces import write_traces


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    write_traces(folder)
    return folder


def test_windows_have_bounds_and_sessions_have_none(traces: Path) -> None:
    def bound(window: str, device: str) -> dict[str, float] | None:
        return bound_of(Cell(traces, window, device, "baton"), 0.9)

    assert bound("agents/interactive/0", "base") is None
    base, slow = bound("azure-chat/interactive/0", "base"), bound("azure-chat/interactive/0", "prefill/2")
    assert base is not None
    assert slow is not None
    assert all(0 < slow[kind] < base[kind] for kind in ("window", "long run"))


def test_cells_of_other_code_are_run_again_when_asked(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, key = tmp_path / "out.json", "azure-chat/interactive/0|base|sarathi"
    old: dict[str, Any] = {"goodput": 123.0, "curve": {}, "code": "old"}
    words = ["--windows", "azure-chat/interactive/0", "--schedulers", "sarathi", "--steps", "1"]

    def rerun(*more: str) -> dict[str, Any]:
        out.write_text(json.dumps({"cells": {key: old}}))
        monkeypatch.setattr(sys, "argv", ["wide", "--traces", str(traces), *words, "--json", str(out), *more])
        main()
        return json.loads(out.read_text())["cells"][key]

    assert rerun() == old
    again = rerun("--again")
    assert again["goodput"] < 123.0
    assert again["code"] == code()


def test_the_name_of_the_code_covers_what_the_scheduler_and_its_instances_import() -> None:
    root = Path(__file__).parents[3]
    known = {str(file.relative_to(root)) for file in deciding_files()}
    classes, fits, baselines = "core/types.py", "engine/planning/step_time_fit.py", "sim/baselines/sarathi.py"
    assert {"core/pacing/priority.py", classes, fits, baselines} <= known
    assert not any(name.startswith(("benchmarks/", "models/", "cluster/ingress/")) for name in known)

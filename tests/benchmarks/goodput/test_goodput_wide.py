"""What `benchmarks.goodput.goodput_wide` says of its cells: by others' rates, by the bound, and of which code they are."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goodput.goodput_wide import Bounds, Cell, bound_of, by_bounds, code, deciding_files, main
from tests.benchmarks.small_traces import write_traces

BEST = "the best in each cell"


def cells(**rates: float) -> dict[str, Any]:
    """`a__baton=2.0` is our rate in window a."""
    return {f"{key.replace('__', '/s/0|base|')}": {"goodput": rate} for key, rate in rates.items()}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    write_traces(folder)
    return folder


def test_rates_are_compared_with_the_bound_where_there_is_one() -> None:
    found = cells(a__baton=6.0, a__sarathi=5.0, a__mooncake=4.0, b__baton=9.0, b__sarathi=9.0, c__baton=1.0)
    bounds: Bounds = {
        "a/s/0|base": {"window": 8.0, "long run": 6.0},
        "b/s/0|base": {"window": 10.0, "long run": 9.0},
        "c/s/0|base": {"window": 2.0, "long run": 2.0},
    }
    shares = by_bounds(found, bounds)["window"]
    assert shares["baton"] == pytest.approx((0.75 * 0.9) ** 0.5, abs=1e-3)
    assert shares[BEST] == pytest.approx((0.625 * 0.9) ** 0.5, abs=1e-3)
    assert (shares["cells"], shares["cells_within_reach"]) == (2, 1), "1.25 x 5 <= 8, and 1.25 x 9 > 10"
    assert shares["out_of_reach"] == ["b/s/0|base"]
    assert by_bounds(found, bounds)["long run"]["cells_within_reach"] == 0


@pytest.mark.parametrize("bound", [{"window": 0.0, "long run": 0.0}, None])
def test_where_nobody_can_hold_the_target_or_there_is_no_bound_nothing_is_compared(
    bound: dict[str, float] | None,
) -> None:
    found = by_bounds(cells(a__baton=6.0, a__sarathi=5.0), {"a/s/0|base": bound})["window"]
    assert (found["baton"], found["cells"]) == (0.0, 0)


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
        monkeypatch.setattr(
            sys, "argv", ["goodput_wide", "--traces", str(traces), *words, "--json", str(out), *more]
        )
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

"""What is said of rates: relative to others', to the best of each kind, and to what no scheduler can exceed."""

from typing import Any

import pytest

from benchmarks.goodput.report import BEST, Bounds, by_bounds, summarise
from sim.baselines.table import SCHEDULERS


def cells(**rates: float) -> dict[str, Any]:
    """`a__baton=2.0` is our rate in window a."""
    return {f"{key.replace('__', '/s/0|base|')}": {"goodput": rate} for key, rate in rates.items()}


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


def test_the_summary_compares_with_the_best_of_each_kind() -> None:
    def cell(value: float) -> dict[str, dict[str, float]]:
        return {"goodput": {"0.9": value, "0.99": value}}

    cells = {}
    for where, factor in (("t/s/0", 1.0), ("t/s/1", 4.0), ("t/s/2", 1.0)):
        values = dict.fromkeys(SCHEDULERS, 1.0) | {
            "baton": 3.0,
            "baton-split": 2.0,
            "dynamo": 1.5,
            "sarathi": 2.0,
        }
        if where == "t/s/2":
            values["baton"] = 0.0
        for name, value in values.items():
            cells[f"{where}/{name}/1"] = cell(value * factor)
    bound = {
        f"t/s/{seed}/{target}": {"sustained": sustained, "ever": 12.0}
        for seed, sustained in ((0, 6.0), (1, 6.0), (2, 0.0))
        for target in ("0.9", "0.99")
    }
    summary = summarise(cells, bound)["0.9"]
    assert (summary["windows"], summary["hopeless_windows"]) == (["t/s/0", "t/s/1"], ["t/s/2"])
    assert summary["best"] == {"static": "dynamo", "dynamic": "sarathi"}
    ours = summary["ours"]["baton"]
    assert (ours["ratio_to_best_static"], ours["ratio_to_best_dynamic"]) == (2.0, 1.5)
    assert ours["worst_cell_against_any"] == 1.5
    assert summary["ours_with_hopeless_windows"]["baton"]["worst_cell_against_any"] < 0.01
    assert summary["bound"]["sustained"] == {
        "over_best_static": 2.0,
        "over_best_dynamic": 1.5,
        "baton_reaches": 1.0,
        "baton-split_reaches": 0.667,
    }
    assert summary["bound"]["ever"]["baton_reaches"] == 0.5

"""What the cells of `benchmarks.goodput.goodput` say together: means against the best static and dynamic baseline, a picture."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from sim.baselines.table import SCHEDULERS

OURS = ("baton", "baton-split")
BOUNDS = ("sustained", "ever")
"""In the long run; on the very window."""
_CUT = 0.9
_FLOOR = 1e-3
"""Requests per second and GPU, in place of nothing at all in a geometric mean."""


def summarise(result: dict[str, Any], picture: Path) -> dict[str, Any]:
    """Every cell counts once; `ratio` compares with whichever baseline of the kind is best in the mean over all cells.

    Windows that not every scheduler has been run on are left out. So are those in which more requests are hopeless than may
    miss (`sim.bound`): what is found there is the rate at which a part of a copy happens to have few of them."""
    summary: dict[str, Any] = {}
    for target in ("0.9", "0.99"):
        everywhere = _table(result["cells"], target)
        if not everywhere.get(OURS[0]):
            return {"windows": "no window was run with every scheduler"}
        bounds = {where: result["bound"][f"{where}/{target}"] for where in everywhere[OURS[0]]}
        windows = [where for where, bound in bounds.items() if bound["sustained"]]
        table = {name: {where: values[where] for where in windows} for name, values in everywhere.items()}
        means, best = _means(table), _best(table)
        summary[target] = {
            "windows": windows,
            "hopeless_windows": [where for where in bounds if where not in windows],
            "geometric_mean_goodput": {n: round(means[n], 4) for n in sorted(means, key=lambda n: -means[n])},
            "best": best,
            "bound": {
                kind: _of_bound({where: bounds[where][kind] for where in windows}, table, best)
                for kind in BOUNDS
            },
            "ours": {ours: _against(table, ours, best) for ours in OURS if ours in table},
            "ours_with_hopeless_windows": {
                ours: _against(everywhere, ours, _best(everywhere)) for ours in OURS if ours in everywhere
            },
        }
    _draw(result, picture)
    _draw_curves(result["cells"], picture.with_name(f"{picture.stem}_curves.png"))
    return summary


Table = dict[str, dict[str, float]]
"""Scheduler -> trace/slo/seed -> goodput."""


def _means(table: Table) -> dict[str, float]:
    return {name: _geometric([*values.values()]) for name, values in table.items()}


def _best(table: Table) -> dict[str, str]:
    """Baseline of each kind."""
    means = _means(table)
    return {
        kind: max(
            (name for name, entry in SCHEDULERS.items() if entry.kind == kind and name not in OURS),
            key=lambda name: means.get(name, 0.0),
        )
        for kind in ("static", "dynamic")
    }


def _against(table: Table, ours: str, best: dict[str, str]) -> dict[str, float]:
    means = _means(table)
    ratios = {f"ratio_to_best_{kind}": round(means[ours] / means[name], 3) for kind, name in best.items()}
    return {**ratios, "worst_cell_against_any": round(_worst(table, ours), 3)}


def _of_bound(bound: dict[str, float], table: Table, best: dict[str, str]) -> dict[str, float]:
    limit, means = _geometric([*bound.values()]), _means(table)
    over = {f"over_best_{kind}": round(limit / means[name], 3) for kind, name in best.items()}
    return over | {f"{ours}_reaches": round(means[ours] / limit, 3) for ours in OURS if ours in table}


def _table(cells: dict[str, Any], target: str) -> Table:
    """A table with only the best of the runs that tuned the ratio."""
    table: Table = defaultdict(dict)
    for name, cell in cells.items():
        where, scheduler, _ = name.rsplit("/", 2)
        table[scheduler][where] = max(table[scheduler].get(where, 0.0), cell["goodput"][target])
    whole = set.intersection(*(set(table[name]) for name in SCHEDULERS))
    return {
        name: {where: values[where] for where in sorted(whole)}
        for name, values in table.items()
        if whole <= set(values)
    }


def _geometric(values: list[float]) -> float:
    product = 1.0
    for value in values:
        product *= max(value, _FLOOR) ** (1 / len(values))
    return product


def _worst(table: Table, ours: str) -> float:
    return min(
        max(value, _FLOOR)
        / max(max(other.get(where, 0.0), _FLOOR) for name, other in table.items() if name not in OURS)
        for where, value in table[ours].items()
    )


def _draw(result: dict[str, Any], picture: Path) -> None:
    table = _table(result["cells"], "0.9")
    groups = sorted({where.rsplit("/", 1)[0] for values in table.values() for where in values})
    figure, axes = pyplot.subplots(figsize=(13, 5))
    width = 0.8 / len(table)
    for number, (name, values) in enumerate(sorted(table.items(), key=lambda item: item[0] not in OURS)):
        heights = [
            _geometric([v for where, v in values.items() if where.startswith(group + "/")])
            for group in groups
        ]
        places = [i + number * width for i in range(len(groups))]
        axes.bar(places, heights, width, label=name, hatch="//" if name in OURS else "")
    for i, group in enumerate(groups):
        windows = [where for where in next(iter(table.values())) if where.startswith(group + "/")]
        for kind, style in zip(BOUNDS, ("dotted", "dashed"), strict=True):
            limit = [result["bound"][f"{where}/0.9"][kind] for where in windows]
            if all(limit):
                at = _geometric(limit)
                axes.hlines(at, i - width, i + 0.8, colors="black", linestyles=style)
    axes.set_xticks([i + 0.4 for i in range(len(groups))], groups, rotation=15)
    axes.set_yscale("log")
    axes.set_ylabel("requests/s per GPU at 90 % attainment")
    axes.set_title("Nobody can be above: dotted in the long run, dashed on the windows themselves")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(picture, dpi=90)
    pyplot.close(figure)


def _draw_curves(cells: dict[str, Any], picture: Path) -> None:
    """Attainment over the rate, a plot for each window of the first seed; nothing below 90 %, where runs were cut short."""
    windows = sorted({name.rsplit("/", 2)[0] for name in cells if name.split("/")[2] == "0"})
    figure, plots = pyplot.subplots(
        -(-len(windows) // 3), 3, figsize=(15, 4 * -(-len(windows) // 3)), squeeze=False
    )
    for axes, where in zip(plots.flat, windows, strict=False):
        for name, cell in sorted(cells.items()):
            own, scheduler, _ = name.rsplit("/", 2)
            points = sorted((float(rate), share) for rate, share in cell["curve"].items() if share >= _CUT)
            if own == where and points:
                ours = scheduler in OURS
                axes.plot(*zip(*points, strict=True), label=scheduler, linewidth=2.5 if ours else 1.0)
        axes.axhline(0.99, color="black", linewidth=0.5)
        axes.set_title(where.rsplit("/", 1)[0])
        axes.set_xlabel("requests/s per GPU")
        axes.legend(fontsize=6)
    for axes in plots.flat[len(windows) :]:
        axes.set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=70)
    pyplot.close(figure)

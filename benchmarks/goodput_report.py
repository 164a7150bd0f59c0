"""What the cells of `benchmarks.goodput` say together: means against the best static and dynamic baseline, a picture."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from sim.baselines.table import SCHEDULERS

OURS = ("baton", "baton-split")
_CUT = 0.9
_FLOOR = 1e-3
"""Requests per second and GPU, in place of nothing at all in a geometric mean."""


def summarise(result: dict[str, Any], picture: Path) -> dict[str, Any]:
    """Every cell counts once; `ratio` compares with whichever baseline of the kind is best in the mean over all cells.

    Windows that not every scheduler has been run on are left out."""
    summary: dict[str, Any] = {}
    for target in ("0.9", "0.99"):
        table = _table(result["cells"], target)
        if not table.get(OURS[0]):
            return {"windows": "no window was run with every scheduler"}
        means = {name: _geometric(list(values.values())) for name, values in table.items()}
        best = {
            kind: max(
                (name for name, entry in SCHEDULERS.items() if entry.kind == kind and name not in OURS),
                key=lambda name: means.get(name, 0.0),
            )
            for kind in ("static", "dynamic")
        }
        bounds = [result["bound"][f"{where}/{target}"] for where in table[OURS[0]]]
        summary[target] = {
            "windows": [*table[OURS[0]]],
            "geometric_mean_goodput": {
                n: round(m, 4) for n, m in sorted(means.items(), key=lambda kv: -kv[1])
            },
            "best": best,
            "ours": {
                ours: {
                    **{
                        f"ratio_to_best_{kind}": round(means[ours] / means[name], 3)
                        for kind, name in best.items()
                    },
                    "worst_cell_against_any": round(_worst(table, ours), 3),
                    "share_of_bound": round(means[ours] / _geometric(bounds), 3),
                }
                for ours in OURS
                if ours in table
            },
        }
    _draw(result, picture)
    _draw_curves(result["cells"], picture.with_name(f"{picture.stem}_curves.png"))
    return summary


def _table(cells: dict[str, Any], target: str) -> dict[str, dict[str, float]]:
    """Scheduler -> trace/slo/seed -> goodput; of the runs that tuned the ratio only the best."""
    table: dict[str, dict[str, float]] = defaultdict(dict)
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


def _worst(table: dict[str, dict[str, float]], ours: str) -> float:
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
        at = [
            v for name, v in result["bound"].items() if name.startswith(group + "/") and name.endswith("/0.9")
        ]
        axes.hlines(_geometric(at), i - width, i + 0.8, colors="black", linestyles="dotted")
    axes.set_xticks([i + 0.4 for i in range(len(groups))], groups, rotation=15)
    axes.set_yscale("log")
    axes.set_ylabel("requests/s per GPU at 90 % attainment (dotted: clairvoyant bound)")
    axes.legend(ncols=4, fontsize=8)
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

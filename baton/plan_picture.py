"""Draws what fleets cost, and for how many requests they hold the targets."""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from sim.planning.plan_fleets import kind_of
from sim.planning.plan_trial import Trial

_MARKERS = "osD^vP*X<>"
_LEGEND_COLUMNS, _TITLE_COLUMNS = 30, 90
_MARGIN = 0.1
"""Space above and below the points, of what they span."""


def draw_plan(
    trials: Sequence[Trial], best: Trial | None, wanted: float, finding: str, picture: Path
) -> None:
    """Draw one point for each fleet that was tried, hollow where it does not hold. The title is the finding."""
    figure, axes = pyplot.subplots(figsize=(10, 5.5), layout="constrained")
    by_kind: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_kind[kind_of(trial.parts)].append(trial)
    for number, (kind, own) in enumerate(sorted(by_kind.items())):
        marker, color = _MARKERS[number % len(_MARKERS)], f"C{number % 10}"
        label: str | None = textwrap.fill(kind, _LEGEND_COLUMNS)
        for trial in sorted(own, key=lambda trial: trial.attained < wanted):
            fill = "full" if trial.attained >= wanted else "none"
            point = trial.dollars_per_h, trial.attained
            axes.plot(*point, marker, color=color, fillstyle=fill, label=label, clip_on=False)
            label = None
    axes.axhline(wanted, color="gray", linewidth=0.8, zorder=0)
    axes.text(1.01, wanted, f"{wanted:.0%}", color="gray", va="center", transform=axes.get_yaxis_transform())
    if best is not None:
        axes.axvline(best.dollars_per_h, color="gray", linewidth=0.8, linestyle="dotted", zorder=0)
    lowest = min([wanted, *(trial.attained for trial in trials)])
    axes.set_ylim(lowest - _MARGIN * (1.01 - lowest), 1.0 + _MARGIN * (1.01 - lowest))
    axes.set_xlim(0, 1.05 * max((trial.dollars_per_h for trial in trials), default=1.0))
    axes.set_xlabel("dollars an hour")
    axes.set_ylabel("share within both targets (hollow: at most)")
    axes.set_title(textwrap.fill(finding, _TITLE_COLUMNS), fontsize=10, loc="left", parse_math=False)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(picture)
    pyplot.close(figure)

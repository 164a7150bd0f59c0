"""Draws what fleets cost, and how many requests they serve within the targets."""

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from sim.planner import Trial


def draw_plan(
    trials: list[Trial], best: Trial | None, wanted: float, picture: Path, name_of: Callable[[Trial], str]
) -> None:
    """Draw one point for each fleet that was tried."""
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for gpu in sorted({trial.fleet.gpu for trial in trials}):
        own = [trial for trial in trials if trial.fleet.gpu == gpu]
        means = [trial.mean for trial in own]
        errors = [
            [trial.mean - min(trial.attainments) for trial in own],
            [max(trial.attainments) - trial.mean for trial in own],
        ]
        axes.errorbar([t.fleet.dollars_per_h for t in own], means, yerr=errors, fmt="o", capsize=3, label=gpu)
    axes.axhline(wanted, color="black", linestyle="dotted")
    if best is not None:
        axes.annotate(
            name_of(best), (best.fleet.dollars_per_h, best.mean), xytext=(8, -14), textcoords="offset points"
        )
    axes.set_xlabel("dollars an hour")
    axes.set_ylabel("share of requests within both targets (bars: over seeds)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture)
    pyplot.close(figure)

"""Draws what fleets cost, and for how many requests they hold the targets."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from sim.plan_trial import Trial

_MARKERS = "osD^vP*X<>"


def draw_plan(
    trials: Sequence[Trial], best: Trial | None, wanted: float, finding: str, picture: Path
) -> None:
    """Draw one point for each fleet that was tried, hollow where it does not hold. The title is the finding."""
    figure, axes = pyplot.subplots(figsize=(10, 5.5), layout="constrained")
    kinds = sorted({_kind(trial) for trial in trials})
    for number, kind in enumerate(kinds):
        marker, color = _MARKERS[number % len(_MARKERS)], f"C{number % 10}"
        for holds in (True, False):
            own = [t for t in trials if _kind(t) == kind and (t.attained >= wanted) == holds]
            label = (
                kind if holds or not any(t.attained >= wanted for t in trials if _kind(t) == kind) else None
            )
            points = [t.dollars_per_h for t in own], [t.attained for t in own]
            fill = "full" if holds else "none"
            axes.plot(
                *points, marker, color=color, fillstyle=fill, label=label if own else None, clip_on=False
            )
    axes.axhline(wanted, color="gray", linewidth=0.8, zorder=0)
    axes.text(1.01, wanted, f"{wanted:.0%}", color="gray", va="center", transform=axes.get_yaxis_transform())
    if best is not None:
        axes.axvline(best.dollars_per_h, color="gray", linewidth=0.8, linestyle="dotted", zorder=0)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, 1.05 * max((trial.dollars_per_h for trial in trials), default=1.0))
    axes.set_xlabel("dollars an hour")
    axes.set_ylabel("share within both targets (hollow: at most)")
    axes.set_title(textwrap.fill(finding, 110), fontsize=10, loc="left", parse_math=False)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(picture)
    pyplot.close(figure)


def _kind(trial: Trial) -> str:
    """Return the trial's fleet without its numbers."""
    words: list[str] = []
    for part in trial.parts:
        mesh = "".join(f" {axis}{size}" for axis, size in (("tp", part.tp), ("pp", part.pp)) if size > 1)
        roles = ((part.num_prefill, "prefill"), (part.num_decode, "decode"), (part.num_both, "any role"))
        words += [f"{part.gpu}{mesh} {role}" for count, role in roles if count]
    return " + ".join(words)

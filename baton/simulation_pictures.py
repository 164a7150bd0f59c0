"""Draws simulations: requests that wait and decode over time, how many hold which target, what a fleet serves at which rate."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from core.types import Slo
from sim.outcome_report import ServedRequest, attainment, crowd

_GOALS = (0.9, 0.99)


def draw_timeline(served: Sequence[ServedRequest], picture: Path) -> None:
    """Draw the requests without a first token, and those with one but no end."""
    times, waiting, decoding = zip(*crowd(served), strict=True)
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    axes.stackplot(
        times, waiting, decoding, labels=["before the first token", "decoding"], step="post", alpha=0.8
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests")
    figure.legend(loc="outside upper right", ncols=2)
    axes.set_title(f"at most {max(waiting)} requests wait for their first token", loc="left")
    _save(figure, picture)


def draw_attainment(served: Sequence[ServedRequest], slo: Slo, picture: Path) -> None:
    """Draw the share of all offered requests over the multiple of its target that a request takes. The title says why those that
    miss do so."""
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    targets = [one.slo or slo for one in served]
    pairs = list(zip(served, targets, strict=True))
    _curve(axes, [one.ttft_s / own.ttft_s for one, own in pairs], "time to the first token")
    _curve(axes, [one.tpot_s / own.tpot_s for one, own in pairs], "time per output token")
    axes.axvline(1.0, color="gray", linewidth=0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("by its target (1: the target itself)")
    axes.set_ylabel("share of offered requests")
    axes.set_title(why_missed(served, slo), loc="left")
    figure.legend(loc="outside lower center", ncols=2)
    _save(figure, picture)


def why_missed(served: Sequence[ServedRequest], slo: Slo) -> str:
    """Return in a sentence how many hold both targets, and what the others miss."""
    counts = dict.fromkeys(("unanswered", "late", "slow"), 0)
    for one in served:
        if one.holds(slo):
            continue
        is_late = one.ttft_s > (one.slo or slo).ttft_s
        counts["unanswered" if one.e2e_s == inf else "late" if is_late else "slow"] += 1
    held = f"{attainment(served, slo):.1%} hold both targets"
    missed = [f"{count / len(served):.1%} {word}" for word, count in counts.items() if count]
    return f"{held} ({', '.join(missed)})" if missed else held


def draw_goodput(by_rate: Mapping[float, Sequence[ServedRequest]], slo: Slo, picture: Path) -> None:
    """Draw the share of requests that hold both targets over the offered rate. The title says up to which rate they do."""
    rates = sorted(by_rate)
    shares = [attainment(by_rate[rate], slo) for rate in rates]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(rates, shares, marker="o", clip_on=False)
    for goal in _GOALS:
        axes.axhline(goal, color="gray", linewidth=0.5)
        axes.text(1.01, goal, f"{goal:.0%}", color="gray", va="center", transform=axes.get_yaxis_transform())
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("offered requests/s")
    axes.set_ylabel("share within both targets")
    axes.set_title(holds_until(rates, shares, _GOALS[0]))
    _save(figure, picture)


def holds_until(rates: Sequence[float], shares: Sequence[float], goal: float) -> str:
    """Return in a sentence up to which of the rates, which grow, enough requests hold."""
    held = [rate for rate, share in zip(rates, shares, strict=True) if share >= goal]
    failed = [rate for rate, share in zip(rates, shares, strict=True) if share < goal]
    if not held:
        return f"at {rates[0]:.3g} requests/s fewer than {goal:.0%} hold both targets already"
    if not failed:
        return f"{goal:.0%} hold both targets at {held[-1]:.3g} requests/s and perhaps at more"
    below = max((rate for rate in held if rate < failed[0]), default=0.0)
    return f"{goal:.0%} hold both targets at {below:.3g} requests/s and no longer at {failed[0]:.3g}"


def _curve(axes: Axes, values: Sequence[float], name: str) -> None:
    """Draw the share of values up to each. Infinite ones count, and are never reached."""
    ordered = sorted(value for value in values if value < inf)
    axes.step(ordered, [(i + 1) / len(values) for i in range(len(ordered))], where="post", label=name)


def _save(figure: Figure, picture: Path) -> None:
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)

"""Draws simulations: requests that wait and decode over time, how many hold which target, what a fleet serves at which rate."""

from collections.abc import Mapping, Sequence
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
    """Draw the share of all offered requests that would hold a target, over that target."""
    figure, (first, then) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    _curve(first, [one.ttft_s for one in served], slo.ttft_s, "time to the first token, s")
    _curve(then, [one.tpot_s * 1e3 for one in served], slo.tpot_s * 1e3, "time per output token, ms")
    first.set_ylabel("share of offered requests")
    figure.suptitle(f"both targets: {attainment(served, slo):.1%}")
    _save(figure, picture)


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


def _curve(axes: Axes, values: Sequence[float], target: float, name: str) -> None:
    """Return a curve. Infinite values count as offered, and never hold."""
    ordered = sorted(value for value in values if value < float("inf"))
    axes.step(ordered, [(i + 1) / len(values) for i in range(len(ordered))], where="post")
    axes.axvline(target, color="black", linestyle="dotted")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"{name} (dotted: the target)")


def _save(figure: Figure, picture: Path) -> None:
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)

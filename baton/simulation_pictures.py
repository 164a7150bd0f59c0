"""Draws simulations: requests that wait and decode over time, how many hold which target, what a fleet serves at which rate."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from core.types import Slo
from sim.outcome_report import ServedRequest, attainment, crowd, good_per_s

_GOALS = (0.9, 0.99)


def draw_timeline(served: Sequence[ServedRequest], picture: Path) -> None:
    """Draw the requests without a first token, and those with one but no end."""
    times, waiting, decoding = zip(*crowd(served), strict=True)
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    axes.stackplot(
        times, waiting, decoding, labels=["before the first token", "decoding"], step="post", alpha=0.8
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests")
    axes.legend(loc="upper left")
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
    """Draw the requests a second that hold both targets, and their share, over the offered rate."""
    rates = sorted(by_rate)
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(
        rates, [good_per_s(by_rate[rate], slo, rate) for rate in rates], marker="o", label="within both"
    )
    axes.plot(rates, rates, color="gray", linestyle="dotted", label="offered")
    axes.set_xlabel("offered requests/s")
    axes.set_ylabel("requests/s within both targets")
    axes.legend(loc="upper left")
    shares = axes.twinx()
    shares.plot(rates, [attainment(by_rate[rate], slo) for rate in rates], color="black", linestyle="dashed")
    for goal in _GOALS:
        shares.axhline(goal, color="black", linewidth=0.5)
    shares.set_ylim(0, 1.02)
    shares.set_ylabel("share within both (dashed)")
    _save(figure, picture)


def _curve(axes: Axes, values: Sequence[float], target: float, name: str) -> None:
    """Return a curve. Infinite values count as offered, and never hold."""
    ordered = sorted(value for value in values if value < float("inf"))
    axes.step(ordered, [(i + 1) / len(values) for i in range(len(ordered))], where="post")
    axes.axvline(target, color="black", linestyle="dotted")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"{name} (dotted: the target)")


def _save(figure: Figure, picture: Path) -> None:
    figure.tight_layout()
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)

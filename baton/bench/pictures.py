"""Pictures of what `baton bench` measured."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from baton.bench.client import Record
from baton.bench.measure import Summary, gaps_s, ttft_s

mpl.use("Agg")
from matplotlib import pyplot as plt


def draw(path: Path, summaries: Sequence[Summary], runs: Sequence[Sequence[Record]]) -> None:
    """Distributions of TTFT and ITL, requests over time, and attainment by rate."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for summary, records in zip(summaries, runs, strict=True):
        label = f"{summary.offered_rate:.4g}/s" if summary.offered_rate else None
        good = [record for record in records if not record.error]
        _cdf(axes[0][0], [ttft_s(r) * 1e3 for r in good], label)
        _cdf(axes[0][1], [gap * 1e3 for r in good for gap in gaps_s(r)], label)
        axes[1][0].scatter([r.sent_at for r in good], [ttft_s(r) * 1e3 for r in good], s=8, label=label)
    _label(axes[0][0], "time to first token", "ms", "share of requests")
    _label(axes[0][1], "inter-token latency", "ms", "share of gaps")
    _label(axes[1][0], "time to first token over the run", "s since start", "ms")
    if len(summaries) > 1:
        _attainment(axes[1][1], summaries)
    else:
        _throughput(axes[1][1], [t for records in runs for record in records for t in record.tokens_at])
    if len(summaries) > 1:
        axes[0][0].legend(title="offered")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _attainment(axis: Any, summaries: Sequence[Summary]) -> None:
    ordered = sorted(summaries, key=lambda summary: summary.offered_rate)
    rates = [summary.offered_rate for summary in ordered]
    axis.plot(rates, [100 * summary.attainment for summary in ordered], marker="o")
    axis.axhline(90, linestyle=":", color="grey")
    axis.set_ylim(0, 103)
    _label(axis, "SLO attainment", "offered requests/s", "% of offered requests")


def _throughput(axis: Any, tokens_at: list[float]) -> None:
    """Pieces of answers received in each of up to 60 slices of the run."""
    slice_s = max(1.0, max(tokens_at, default=0.0) / 60)
    counts = Counter(int(t / slice_s) for t in tokens_at)
    slices = range(max(counts, default=0) + 1)
    axis.step([i * slice_s for i in slices], [counts[i] / slice_s for i in slices], where="post")
    _label(axis, "output over the run", "s since start", "tokens/s")


def _cdf(axis: Any, values: list[float], label: str | None) -> None:
    ordered = sorted(values)
    axis.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=label)


def _label(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)

"""The picture of a soak: answers and faults over time, and what the processes that lived through have taken."""

import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.soak.soak_faults import SURVIVORS, Happened
from benchmarks.soak.soak_watch import Sample, Watch

_BIN_S = 5.0
_WARM = "#999999"


def draw(
    path: Path,
    answered: Sequence[tuple[float, float]],
    faults: Sequence[Happened],
    watch: Watch,
    *,
    began: float,
    warm_at: float,
) -> None:
    """Write the picture, over seconds since `began`. `answered`: when each answer was complete, and how long it took."""
    figure, axes = pyplot.subplots(4, 1, figsize=(9, 8), sharex=True, height_ratios=(2, 2, 2, 2))
    _draw_answers(axes[0], answered, began)
    _draw_times(axes[1], answered, faults, began)
    _draw_holdings(axes[2], axes[3], watch, began, warm_at)
    axes[3].set_xlabel("seconds")
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    path.write_text("".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines()))
    pyplot.close(figure)


def _draw_answers(axes: Axes, answered: Sequence[tuple[float, float]], began: float) -> None:
    counts = Counter(int((at - began) / _BIN_S) for at, _ in answered)
    places = range(max(counts, default=0) + 1)
    axes.step(
        [place * _BIN_S for place in places], [counts[place] / _BIN_S for place in places], where="post"
    )
    axes.set_ylabel("right answers / s")
    axes.set_ylim(bottom=0)


def _draw_times(
    axes: Axes, answered: Sequence[tuple[float, float]], faults: Sequence[Happened], began: float
) -> None:
    binned: defaultdict[int, list[float]] = defaultdict(list)
    for at, took in answered:
        binned[int((at - began) / _BIN_S)].append(took)
    places = [place * _BIN_S for place in sorted(binned)]
    for name, of in (("longest", max), ("median", median)):
        axes.step(places, [of(binned[place]) for place in sorted(binned)], where="post", label=name)
    axes.set_yscale("log")
    axes.set_ylabel("s / answer")
    axes.legend(fontsize=8, loc="upper right")
    for fault in faults:
        axes.axvspan(
            fault.at - began,
            max(fault.ended_at, fault.at) - began,
            color="tab:red",
            alpha=0.15,
            linewidth=0.5,
        )
    axes.set_title("shaded: a fault lasts", fontsize=9)


def _draw_holdings(memory: Axes, descriptors: Axes, watch: Watch, began: float, warm_at: float) -> None:
    for name, pid in sorted(watch.samples):
        if name not in SURVIVORS:
            continue
        samples = watch.samples[name, pid]
        at = [sample.at - began for sample in samples]
        base = _first(samples, warm_at)
        memory.plot(at, [100 * sample.rss_bytes / base.rss_bytes for sample in samples], label=name)
        descriptors.plot(at, [sample.descriptors for sample in samples], label=name)
    memory.axhline(102, color=_WARM, linestyle=":")
    for axes in (memory, descriptors):
        axes.axvline(warm_at - began, color=_WARM, linestyle="--")
        axes.legend(fontsize=8, loc="lower right")
    memory.set_ylabel("RSS / RSS at the\nwarm-up's end, %")
    descriptors.set_ylabel("descriptors")


def _first(samples: Sequence[Sample], warm_at: float) -> Sample:
    return next((sample for sample in samples if sample.at >= warm_at), samples[-1])

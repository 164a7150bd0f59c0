"""What the rows of an ablation say: by how many points each rule and constant changes the share in time.

A rule *brings* what the full law has in time more than the law without it, on the same arrivals. Loads weigh alike. Intervals are
of the bootstrap over requests: of each run, those that gained and lost by the rule are drawn again, 95 % of 2,000 times."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.goodput.ablation_runs import FULL, constants
from benchmarks.goodput.rules import RULES

LEAST_MEAN, LEAST_OWN = 0.3, 1.0
"""Points: a rule that brings less than this in the mean, and in its own case, is to go."""
LEAST_LOADS = 8
"""Fewer loads say nothing of a rule."""
_DRAWS, _SEED = 2_000, 1
_INTERVAL = (2.5, 97.5)
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Effect:
    """What a variant changes, in points of the share in time."""

    mean: float
    low: float
    high: float
    by_load: Mapping[str, float]
    num_runs: int

    @property
    def worst(self) -> tuple[str, float]:
        return min(self.by_load.items(), key=lambda item: item[1])

    @property
    def best(self) -> tuple[str, float]:
        return max(self.by_load.items(), key=lambda item: item[1])

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def effect_of(rows: Iterable[Row], group: str, *, sign: int) -> Effect | None:
    """Return what the runs of one variant change in a group; None where none of them has it. With a `sign` of -1 it is what the
    full law has more."""
    by_load = defaultdict[str, list[tuple[int, int, int]]](list)
    for row in rows:
        if (of := row["groups"].get(group)) is not None:
            by_load[row["load"]].append((of["requests"], of["gained"], of["lost"]))
    if not by_load:
        return None
    rng = np.random.default_rng(_SEED)
    means, drawn = dict[str, float](), list[Any]()
    for load, runs in by_load.items():
        means[load] = sign * 100 * fmean((gained - lost) / count for count, gained, lost in runs) + 0.0
        drawn.append(sum(_drawn(rng, *run) for run in runs) * (sign * 100 / len(runs)))
    low, high = np.percentile(sum(drawn) / len(drawn), _INTERVAL)
    num_runs = sum(map(len, by_load.values()))
    return Effect(fmean(means.values()), float(low), float(high), means, num_runs)


def _drawn(rng: np.random.Generator, count: int, gained: int, lost: int) -> Any:
    shares = [gained / count, lost / count, max(0.0, 1 - (gained + lost) / count)]
    counts = rng.multinomial(count, shares, size=_DRAWS)
    return (counts[:, 0] - counts[:, 1]) / count


def verdict(mean: Effect, own: Effect | None) -> str:
    """Return whether a rule is to stay. It is open while few loads were run, or not its own case, or an interval has a threshold
    in it."""
    if len(mean.by_load) < LEAST_LOADS:
        return "open: few loads"
    if mean.low >= LEAST_MEAN or (own is not None and own.low >= LEAST_OWN):
        return "stays"
    if own is not None and mean.high < LEAST_MEAN and own.high < LEAST_OWN:
        return "goes"
    return "open" if own is not None else "open: its own case was not run"


def rule_table(rows: Sequence[Row]) -> list[str]:
    """Return a line for each rule that was run, what brings most first."""
    found = list[tuple[float, str]]()
    for rule in RULES:
        own_rows = [row for row in rows if row["variant"] == f"without {rule.name}"]
        if (mean := effect_of(own_rows, "all", sign=-1)) is None:
            continue
        case = [row for row in own_rows if row["load"].startswith(f"{rule.case} ")]
        own = effect_of(case, rule.group, sign=-1)
        cells = (
            f"{rule.name} ({rule.record or 'no record'})",
            str(mean),
            *(f"{points:+.1f}, {load.replace('|', ', ')}" for load, points in (mean.worst, mean.best)),
            f"{rule.case}{'' if rule.group == 'all' else ', ' + rule.group}: {own or 'not run'}",
            f"{sum(_is_same(row, rows) for row in own_rows)} of {mean.num_runs}",
            verdict(mean, own),
        )
        found.append((mean.mean, f"| {' | '.join(cells)} |"))
    head = "| rule (record) | brings, points | worst load | best load | own case | runs without any change | verdict |"
    return [head, "|---|---|---|---|---|---|---|", *(line for _, line in sorted(found, reverse=True))]


def _is_same(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether the run decided as the full law's did, in everything."""
    return any(
        full["variant"] == FULL
        and (full["load"], full["arrivals"], full["decisions"])
        == (row["load"], row["arrivals"], row["decisions"])
        for full in rows
    )


def constant_table(rows: Sequence[Row]) -> list[str]:
    """Return a line for each constant that was halved or doubled."""
    lines = list[str]()
    for constant in constants():
        cells = list[str]()
        for name in ("half", "double"):
            own = [row for row in rows if row["variant"] == f"{name} {constant.name}"]
            effect = effect_of(own, "all", sign=1)
            value = f"{constant.others.get(name, constant.value):g}"
            cells.append("not run" if effect is None else f"{value}: {effect}, worst {effect.worst[1]:+.1f}")
        if cells != ["not run"] * 2:
            about = f"{constant.value:g} {constant.unit} | {constant.least:g} to {constant.most:g}"
            lines.append(f"| `{constant.name}` | {about} | {cells[0]} | {cells[1]} | {constant.why} |")
    return ["| constant | value | range | halved | doubled | why |", "|---|---|---|---|---|---|", *lines]


def report(rows: Sequence[Row]) -> str:
    """Return both tables, as Markdown."""
    loads = {row["load"] for row in rows}
    seeds = {row["arrivals"] for row in rows}
    head = f"{len(rows)} runs: {len(loads)} loads, {len(seeds)} sets of arrivals."
    return "\n".join([head, "", *rule_table(rows), "", *constant_table(rows)])

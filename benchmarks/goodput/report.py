"""What goodput's cells say together: our rates relative to others' and to what no scheduler can exceed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import geometric_mean
from typing import Any

from sim.baselines.table import OURS, SCHEDULERS

SPLIT = "baton-split"
"""Our scheduler on a fleet of fixed roles, in the ratio that suits the static ones best."""

FLOOR = 1e-3
"""Requests per second, in place of nothing at all in a geometric mean."""
BEST = "the best in each cell"
WANTED = 1.25
"""Times the best baseline's rate: the target."""
Bounds = dict[str, dict[str, float] | None]
"""By window and device what no scheduler can exceed: on the `window` itself, and in the `long run`, which a burst of 20 s with
long outputs can be above, since what is left after its last arrival is done later. It is 0 where none can hold the target, and
None for sessions."""
PlaceRequest = tuple[str, ...]


def ratios(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return our rate by each other's, on the windows, devices and splits that both were run on: mean, worst, and how many."""
    pairs: dict[str, dict[PlaceRequest, float]] = {}
    for at, by_name in _rates(cells).items():
        others = {name: rate for name, rate in by_name.items() if name != OURS}
        if OURS in by_name and others:
            for name, rate in (*others.items(), (BEST, max(others.values()))):
                pairs.setdefault(name, {})[at] = (by_name[OURS] + FLOOR) / (rate + FLOOR)
    return {name: _summary(found) for name, found in sorted(pairs.items())}


def by_bounds(cells: Mapping[str, Mapping[str, Any]], bounds: Bounds) -> dict[str, dict[str, Any]]:
    """Return, for each kind of bound, our rate and the best other's by it, in the mean of the windows and devices that have one
    and both were run on, and in how many of them it allows `WANTED` times the best other's."""
    return {kind: _by_bound(cells, bounds, kind) for kind in ("window", "long run")}


def _by_bound(cells: Mapping[str, Mapping[str, Any]], bounds: Bounds, kind: str) -> dict[str, Any]:
    shares: dict[str, tuple[float, float]] = {}
    for where, rates in _rates(cells).items():
        others = [rate for name, rate in rates.items() if name != OURS]
        known = bounds.get("|".join(where[:2]))
        if OURS in rates and others and known and (bound := known[kind]):
            shares["|".join(filter(None, where))] = (
                (rates[OURS] + FLOOR) / bound,
                (max(others) + FLOOR) / bound,
            )
    best = [share for _, share in shares.values()]
    return {
        OURS: round(geometric_mean(ours for ours, _ in shares.values()), 3) if shares else 0.0,
        BEST: round(geometric_mean(best), 3) if shares else 0.0,
        "cells": len(shares),
        "cells_within_reach": sum(WANTED * share <= 1 for share in best),
        "out_of_reach": sorted(where for where, (_, share) in shares.items() if WANTED * share > 1),
    }


def _rates(cells: Mapping[str, Mapping[str, Any]]) -> dict[PlaceRequest, dict[str, float]]:
    """Return the rates by (window, device, split) and scheduler."""
    rates: dict[PlaceRequest, dict[str, float]] = {}
    for key, cell in cells.items():
        *where, scheduler = key.split("|")
        name, _, prefills = scheduler.partition(":")
        rates.setdefault((*where, prefills), {})[name] = cell["goodput"]
    return rates


def _summary(found: Mapping[PlaceRequest, float]) -> dict[str, Any]:
    worst = min(found, key=lambda at: found[at])
    return {
        "mean": round(geometric_mean(found.values()), 3),
        "worst": round(found[worst], 3),
        "worst_at": "|".join(part for part in worst if part),
        "cells": len(found),
    }


Table = dict[str, dict[str, float]]
"""Rates, by scheduler and window."""


def summarise(cells: Mapping[str, Any], bounds: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Compare ours with the static and the dynamic baseline that is best in the mean, for each target. Cells are named
    `trace/targets/seed/scheduler/prefill instances`, bounds `trace/targets/seed/target`.

    Every cell counts once. Windows that not every scheduler has been run on are left out. So are those in which more requests
    are hopeless than may miss (`sim.bound`): what is found there is the rate at which a part of a copy happens to have few of
    them."""
    summary: dict[str, Any] = {}
    for target in ("0.9", "0.99"):
        everywhere = _table(cells, target)
        if not everywhere.get(OURS):
            return {"windows": "no window was run with every scheduler"}
        bound = {where: bounds[f"{where}/{target}"] for where in everywhere[OURS]}
        windows = [where for where in bound if bound[where]["sustained"]]
        table = {name: {where: values[where] for where in windows} for name, values in everywhere.items()}
        means, best = _means(table), _best(table)
        summary[target] = {
            "windows": windows,
            "hopeless_windows": [where for where in bound if where not in windows],
            "geometric_mean_goodput": {n: round(means[n], 4) for n in sorted(means, key=lambda n: -means[n])},
            "best": best,
            "bound": {
                kind: _of_bound([bound[where][kind] for where in windows], means, best)
                for kind in ("sustained", "ever")
            },
            "ours": _of_ours(table),
            "ours_with_hopeless_windows": _of_ours(everywhere),
        }
    return summary


def _of_ours(table: Table) -> dict[str, dict[str, float]]:
    means, best = _means(table), _best(table)
    return {
        ours: {f"ratio_to_best_{kind}": round(means[ours] / means[name], 3) for kind, name in best.items()}
        | {"worst_cell_against_any": round(_worst(table, ours), 3)}
        for ours in (OURS, SPLIT)
        if ours in table
    }


def _means(table: Table) -> dict[str, float]:
    return {name: _floored_mean(values.values()) for name, values in table.items()}


def _floored_mean(values: Iterable[float]) -> float:
    return geometric_mean(max(value, FLOOR) for value in values)


def _best(table: Table) -> dict[str, str]:
    """Return the best baseline of each kind."""
    means = _means(table)
    return {
        kind: max(
            (name for name, entry in SCHEDULERS.items() if entry.kind == kind and name != OURS),
            key=lambda name: means.get(name, 0.0),
        )
        for kind in ("static", "dynamic")
    }


def _of_bound(
    bound: Iterable[float], means: Mapping[str, float], best: Mapping[str, str]
) -> dict[str, float]:
    limit = _floored_mean(bound)
    over = {f"over_best_{kind}": round(limit / means[name], 3) for kind, name in best.items()}
    return over | {
        f"{ours}_reaches": round(means[ours] / limit, 3) for ours in (OURS, SPLIT) if ours in means
    }


def _table(cells: Mapping[str, Any], target: str) -> Table:
    """Return a table with only the best of the runs that tuned the ratio."""
    table: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, cell in cells.items():
        where, scheduler, _ = name.rsplit("/", 2)
        table[scheduler][where] = max(table[scheduler].get(where, 0.0), cell["goodput"][target])
    whole = set.intersection(*(set(table[name]) for name in SCHEDULERS))
    return {
        name: {where: values[where] for where in sorted(whole)}
        for name, values in table.items()
        if whole <= set(values)
    }


def _worst(table: Table, ours: str) -> float:
    others = [values for name, values in table.items() if name not in (OURS, SPLIT)]
    return min(
        max(value, FLOOR) / max(max(other.get(where, 0.0), FLOOR) for other in others)
        for where, value in table[ours].items()
    )

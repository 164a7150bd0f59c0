"""The cheapest fleet that holds the targets on a trace: every GPU and group size that the model fits, simulated.

For each kind of instance the number of instances begins at what the clairvoyant bound allows and grows until the attainment, in
the mean over the seeds, is what was asked for, or the price has passed that of the best plan so far, or several more in a row
have not helped (a target that this kind of instance cannot hold for some requests, however many there are). Each number is tried
with any instance doing either role, and split in fixed ratios."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from statistics import fmean

from core.errors import ConfigError
from core.types import Slo
from sim.bound import Needs
from sim.catalogue import GPUS, MODELS, CatalogueModel, num_blocks
from sim.catalogued import Fleet, coarse_config, engine_of
from sim.coarse.coarse_workload import jobs
from sim.coarse.world import simulate
from sim.goodput import Window
from sim.outcome_report import ServedRequest, attainment, served_coarsely

_PATIENCE_S = 30.0
"""Seconds after the last arrival. What is not finished by then has missed."""
_MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2))
"""Tensor-parallel ranks and pipeline stages of an instance; up to a host of eight."""
_MAX_IN_VAIN = 4
_PREFILL_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be served, how well."""

    model: str
    window: Window
    slo: Slo
    attainment: float
    seeds: Sequence[int]
    copies: float = 1.0
    gpus: Sequence[str] = tuple(GPUS)
    max_instances: int = 64
    read: CatalogueModel | None = None
    """A model that the catalogue does not have, called `model`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fleet. `attainments`: one for each seed."""

    fleet: Fleet
    attainments: tuple[float, ...]
    late_first: float
    """Share of all requests that missed the first token's target, or were never answered."""
    slow_tokens: float
    """Share that missed only the time per token."""
    busy_share: float

    @property
    def mean(self) -> float:
        return fmean(self.attainments)

    @property
    def limit(self) -> str:
        """Which target is missed by most."""
        if not self.late_first and not self.slow_tokens:
            return "nothing"
        return "time to first token" if self.late_first >= self.slow_tokens else "time per token"


def plan(demand: Demand, heard: Callable[[Trial], None] = lambda _: None) -> list[Trial]:
    """Return all trials, in the order they were made; `cheapest` chooses. Raises ConfigError when the model fits none of the
    GPUs."""
    trials: list[Trial] = []
    best_dollars = float("inf")
    kinds = sorted(_kinds(demand), key=lambda kind: kind.dollars_per_h)
    if not kinds:
        raise ConfigError(
            f"{demand.model} fits no group of up to {max(tp * pp for tp, pp in _MESHES)} of {', '.join(demand.gpus)}"
        )
    for kind in kinds:
        best_mean, in_vain = -1.0, 0
        for count in _counts(demand, kind):
            fleets = [*_fleets(kind, count)]
            if fleets[0].dollars_per_h >= best_dollars:
                break
            tried = [_try(demand, fleet) for fleet in fleets]
            trials += tried
            for trial in tried:
                heard(trial)
            if any(trial.mean >= demand.attainment for trial in tried):
                best_dollars = fleets[0].dollars_per_h
                break
            mean = max(trial.mean for trial in tried)
            in_vain = 0 if mean > best_mean else in_vain + 1
            if in_vain == _MAX_IN_VAIN:
                break
            best_mean = max(best_mean, mean)
    return trials


def cheapest(trials: Sequence[Trial], wanted: float) -> Trial | None:
    """Return the trial that holds for the least dollars, then with the highest attainment."""
    able = [trial for trial in trials if trial.mean >= wanted]
    return min(able, key=lambda trial: (trial.fleet.dollars_per_h, -trial.mean), default=None)


def _kinds(demand: Demand) -> Iterator[Fleet]:
    """Yield fleets of one instance."""
    model = demand.read or MODELS[demand.model]
    for gpu in demand.gpus:
        for tp, pp in _MESHES:
            try:
                num_blocks(GPUS[gpu], model, demand.window.block_tokens, tp * pp)
            except ConfigError:
                continue
            yield Fleet(
                gpu=gpu,
                model=demand.model,
                num_prefill=0,
                num_decode=0,
                num_both=1,
                tp=tp,
                pp=pp,
                read=demand.read,
            )


def _counts(demand: Demand, kind: Fleet) -> Iterator[int]:
    """Yield numbers of instances, from the least that could do by a tenth at a time."""
    part = demand.window
    work = jobs(part.load(demand.copies, demand.seeds[0]), demand.slo, part.block_tokens)
    engine = engine_of(kind, part.block_tokens)
    least_s = Needs(work, demand.slo, engine, part.block_tokens).least_s(demand.attainment)
    # Where too many are hopeless there is no such number: a few are tried, which shows what they miss.
    count = 1 if least_s == inf else max(1, int(least_s / (part.duration_s + _PATIENCE_S)))
    while count <= demand.max_instances:
        yield count
        count = max(count + 1, ceil(count * 1.1))


def _fleets(kind: Fleet, count: int) -> Iterator[Fleet]:
    yield replace(kind, num_both=count)
    for prefill in sorted({round(count * share) for share in _PREFILL_SHARES}):
        if 0 < prefill < count:
            yield replace(kind, num_prefill=prefill, num_decode=count - prefill, num_both=0)


def _try(demand: Demand, fleet: Fleet) -> Trial:
    part, slo = demand.window, demand.slo
    shares: list[float] = []
    busy: list[float] = []
    everything: list[ServedRequest] = []
    for seed in demand.seeds:
        work = jobs(part.load(demand.copies, seed), slo, part.block_tokens)
        outcome = simulate(
            coarse_config(fleet, part.block_tokens), work, until_s=part.duration_s + _PATIENCE_S
        )
        served = served_coarsely(outcome)
        shares.append(attainment(served, slo))
        busy.append(outcome.busy_share)
        everything += served
    late = sum(one.ttft_s > slo.ttft_s for one in everything) / len(everything)
    slow = sum(one.ttft_s <= slo.ttft_s and one.tpot_s > slo.tpot_s for one in everything) / len(everything)
    return Trial(
        fleet=fleet, attainments=tuple(shares), late_first=late, slow_tokens=slow, busy_share=fmean(busy)
    )

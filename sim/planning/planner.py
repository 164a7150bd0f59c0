"""The cheapest fleet that holds the targets on a trace, found within seconds.

What the load takes of every kind of instance is known from its columns (`sim.planning.plan_needs`), so that only fleets near
what it needs are simulated, on the windows that decide (`sim.planning.plan_load`). Of all families of fleets
(`sim.planning.plan_fleets`) the one whose next size is cheapest comes first, less so after each failure; each is searched by
bisection, below the price of the best so far. When the effort is spent (`sim.planning.plan_effort`), the answer is the best
that was found. Then the answer itself is put under more load, until it breaks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.types import Slo
from sim.planning.plan_effort import Effort
from sim.planning.plan_fleets import Family, Hardware, Kind, Rung, families, kinds
from sim.planning.plan_load import Columns, PeakLoad
from sim.planning.plan_trial import Trial, try_fleet

_FIRST_SCALE = 1.25
"""The first size that is tried: so many times what the load takes by estimate."""
_STEP = 1.3
_DOUBT = 1.5
"""Each failure makes a family's next size count as so many times dearer, so that others have their turn."""
_MOST_IN_VAIN = 3
_FOR_HEADROOM = 0.35
"""The share of the effort that is kept for the headroom of an answer."""
_HEADROOMS = (1.3, 2.0, 3.0)
_HEADROOM_PRECISION = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    slo: Slo
    attainment: float
    """Share of the requests that must hold both targets."""
    copies: float = 1.0
    """Superposed copies of the load."""
    max_instances: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be served, how well, of what."""

    hardware: Hardware
    targets: Targets
    loads: Sequence[PeakLoad]
    """The first says what is tried first; a fleet has to hold all of them."""
    whole: Columns
    """All requests, for what no fleet could serve."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """The answer holds `held` times the load, and not `broken` times, where that was tried."""

    held: float
    broken: float | None

    def __str__(self) -> str:
        if self.held == 1.0:
            return f"does not hold {self.broken:.3g}× this load"
        return f"holds {self.held:.3g}× this load" + (f" and not {self.broken:.3g}×" if self.broken else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    trials: tuple[Trial, ...]
    best: Trial | None
    headroom: Headroom | None
    hopeless_share: float
    """Share of the load's requests that no idle instance of these GPUs could serve in time."""
    unable: tuple[str, ...]
    """Instances on which too many are hopeless."""
    num_left: int
    """Families of fleets that were not searched to the end."""


def by_price(trials: Sequence[Trial], wanted: float) -> Trial | None:
    """Return the trial that holds for the least dollars, then with the highest attainment."""
    able = [trial for trial in trials if trial.attained >= wanted]
    return min(able, key=lambda trial: (trial.dollars_per_h, -trial.attained), default=None)


class _Climb:
    """The search on one family's ladder: the smallest rung that holds is above `low`, and at most `high`."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._low, self._high = -1, len(family.rungs)
        self._in_vain, self._most = 0, -1.0
        self.num_failed = 0

    def next(self, below_dollars: float) -> Rung | None:
        """Return the size to try next, of less than that price; None where no such size is left."""
        rungs = self.family.rungs
        end = next((i for i, rung in enumerate(rungs) if rung.dollars_per_h >= below_dollars), len(rungs))
        end = min(self._high, end)
        if self._low + 1 >= end or self._in_vain == _MOST_IN_VAIN:
            return None
        if self._high < len(rungs):
            return rungs[(self._low + end) // 2 if end - self._low > 2 else self._low + 1]
        wanted = rungs[self._low].scale * _STEP if self._low >= 0 else _FIRST_SCALE
        index = next((i for i, rung in enumerate(rungs) if rung.scale >= wanted), end - 1)
        return rungs[max(self._low + 1, min(index, end - 1))]

    def note(self, rung: Rung, trial: Trial, wanted: float) -> None:
        index = self.family.rungs.index(rung)
        if trial.attained >= wanted:
            self._high = index
            return
        self.num_failed += 1
        self._low = max(self._low, index)
        self._in_vain = 0 if trial.attained > self._most else self._in_vain + 1
        self._most = max(self._most, trial.attained)


def plan(
    demand: Demand,
    heard: Callable[[Trial], None] = lambda _: None,
    effort: Effort | None = None,
) -> Plan:
    """Search until nothing cheaper is left to try or `effort`, which has no end unless given, is spent. `heard` is called with
    each trial. Raises ConfigError when the model fits none of the GPUs."""
    effort = effort or Effort()
    load, targets = demand.loads[0], demand.targets
    slo = targets.slo
    block_tokens = load.offered.block_tokens
    instances = demand.hardware.instances(block_tokens)
    all_kinds = kinds(instances, load.columns, slo, block_tokens)
    unable = [kind for kind in all_kinds if kind.needs.hopeless_share > 1 - targets.attainment]
    climbs = [
        _Climb(family)
        for family in families(
            all_kinds,
            load,
            targets.attainment,
            targets.copies,
            targets.max_instances,
            kinds(demand.hardware.shared(block_tokens), load.columns, slo, block_tokens),
        )
    ]
    search = _Search(demand, climbs, heard, effort)
    search.run()
    best = search.best
    return Plan(
        trials=tuple(search.trials),
        best=best,
        headroom=None if best is None else _headroom(demand, best, effort),
        hopeless_share=_hopeless_share(kinds(instances, demand.whole, slo, block_tokens)),
        unable=tuple(_why_unable(kind) for kind in unable),
        num_left=search.num_left,
    )


class _Search:
    def __init__(
        self,
        demand: Demand,
        climbs: list[_Climb],
        heard: Callable[[Trial], None],
        effort: Effort,
    ) -> None:
        self._demand, self._open, self._heard, self._effort = demand, climbs, heard, effort
        self.trials: list[Trial] = []
        self.best: Trial | None = None

    @property
    def num_left(self) -> int:
        return sum(self._next(climb) is not None for climb in self._open)

    def run(self) -> None:
        while self._effort.left:
            self._drop_those_without_a_chance()
            nexts = [(climb, self._next(climb)) for climb in self._open]
            tries = [(climb, rung) for climb, rung in nexts if rung is not None]
            if not tries:
                return
            climb, rung = min(tries, key=lambda pair: self._rank(*pair))
            if (trial := self._try(rung)) is None:
                return
            climb.note(rung, trial, self._demand.targets.attainment)

    def _drop_those_without_a_chance(self) -> None:
        self._open = [climb for climb in self._open if self._next(climb) is not None]

    def _next(self, climb: _Climb) -> Rung | None:
        below = float("inf") if self.best is None else self.best.dollars_per_h
        return climb.next(below)

    @staticmethod
    def _rank(climb: _Climb, rung: Rung) -> float:
        """Return the price that a size counts as."""
        return rung.dollars_per_h * _DOUBT**climb.num_failed

    def _try(self, rung: Rung) -> Trial | None:
        demand = self._demand
        trial = try_fleet(
            rung.parts,
            demand.loads,
            demand.targets.slo,
            copies=demand.targets.copies,
            wanted=demand.targets.attainment,
            effort=self._effort,
        )
        if trial is None:
            return None
        self.trials.append(trial)
        self._heard(trial)
        if trial.attained >= demand.targets.attainment:
            self.best = trial
            self._effort.keep(_FOR_HEADROOM)
        return trial


def _headroom(demand: Demand, best: Trial, effort: Effort) -> Headroom | None:
    """Put the answer under more load, until it breaks or the effort is spent; None where none was left."""
    held, broken = 1.0, None
    grows = iter(_HEADROOMS)
    by_attainment = sorted(zip(best.attainments, demand.loads, strict=True), key=lambda pair: pair[0])
    # Where the fleet holds the least it breaks first.
    loads = [load for _, load in by_attainment]
    effort.keep(0.0)
    while effort.left:
        if broken is None:
            if (at := next(grows, None)) is None:
                break
        elif broken / held <= _HEADROOM_PRECISION:
            break
        else:
            at = (held * broken) ** 0.5
        trial = try_fleet(
            best.parts,
            loads,
            demand.targets.slo,
            copies=demand.targets.copies * at,
            wanted=demand.targets.attainment,
            effort=effort,
        )
        if trial is None:
            break
        if trial.attained >= demand.targets.attainment:
            held = at
        else:
            broken = at
    return None if held == 1.0 and broken is None else Headroom(held, broken)


def _hopeless_share(all_kinds: Sequence[Kind]) -> float:
    """Share of the requests that are hopeless on every kind."""
    everywhere = all_kinds[0].needs.hopeless
    for kind in all_kinds[1:]:
        everywhere = everywhere & kind.needs.hopeless
    return float(everywhere.mean()) if len(everywhere) else 0.0


def _why_unable(kind: Kind) -> str:
    return f"{kind.name}: {kind.needs.hopeless_share:.1%} of the requests miss a target even alone"

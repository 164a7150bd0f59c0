"""Which of several models are awake, where memory holds only some of them.

A model that is awake makes way for one that is asleep where that saves requests: more requests of the highest priority at which
the two differ would be in time. What is compared lies within a horizon of some wake times:

- *an awake model's value* is the number of its requests that would miss their target if it slept for the horizon;
- *a sleeping model's value* is the number of such requests that it still serves in time if it begins to wake up now. It is lower
  than if it were awake, since requests miss their target while it wakes up: that is what a swap costs.

No swap is undone while demand stays as it is, since a model's value is never higher asleep than awake. Requests that have waited
for a part of their patience come before all values, so every model has its turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

HORIZON: float = 4.0
"""In wake times."""
_LEAST_HORIZON_S = 2.0
MARGIN = 0.5
"""By how many requests a swap must be better."""
AGED = 0.5
"""The share of its patience after which a request's model comes before others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingLot:
    """Requests of one model that wait for it."""

    priority: int
    num: int
    left_s: float
    """Until the first of their tokens are due; negative once they are late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingRequests:
    """Requests of one class that will come to a model, as far as it is predicted."""

    priority: int
    rate: float
    """Per second."""
    target_s: float
    """How long after its arrival a request's first token is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of the models that share memory."""

    name: str
    holds: bool
    """Whether it has memory, or may have some: it serves, wakes up or falls asleep."""
    may_sleep: bool = False
    """Whether it may be told to sleep: it serves, and has done so for the least time."""
    is_leaving: bool = False
    """Whether it falls asleep."""
    lots: tuple[WaitingLot, ...] = ()
    streams: tuple[ComingRequests, ...] = ()
    num_running: int = 0
    age: float = 0.0
    """How long its oldest request has waited, as a share of how long that may wait."""
    wake_s: float = 0.0
    drain_s: float = 0.0
    """How long it takes until what runs there has ended."""

    @property
    def num_waiting(self) -> int:
        return sum(lot.num for lot in self.lots)

    @property
    def is_aged(self) -> bool:
        return self.age >= AGED


@dataclass(frozen=True, slots=True)
class Swaps:
    """What shall change. A model is woken when there is memory for it, so its turn comes after another has fallen asleep."""

    wake: tuple[str, ...] = ()
    sleep: tuple[str, ...] = ()


def swaps(contenders: Sequence[Contender], num_awake: int) -> Swaps:
    """Return which models wake up and fall asleep now, where at most `num_awake` may have memory."""
    free = num_awake - sum(one.holds for one in contenders)
    coming = sum(one.is_leaving for one in contenders)
    victims = [one for one in contenders if one.may_sleep and not one.is_leaving]
    wanting = iter(sorted(_wanting(contenders), key=lambda one: _rank(one, contenders)))
    wake = tuple(one.name for one in islice(wanting, max(0, free)))
    sleep = [one.name for one in _weakest_first(victims, contenders)[: max(0, -free - coming)]]
    victims = [one for one in victims if one.name not in sleep]
    for one in islice(wanting, max(0, min(coming, coming + free)), None):
        if not victims:
            break
        victim = _weakest_first(victims, contenders)[0]
        if takes_over(one, victim):
            sleep.append(victim.name)
            victims.remove(victim)
    return Swaps(wake, tuple(sleep))


def takes_over(one: Contender, other: Contender) -> bool:
    """Return whether a model that sleeps shall have the memory of another that is awake."""
    if one.is_aged and one.age > other.age:
        return True
    if other.is_aged:
        return False
    horizon_s = horizon_of(one, other)
    levels = _levels((one, other))
    gains = zip(
        asleep_value(one, levels, horizon_s, other.drain_s),
        awake_value(other, levels, horizon_s),
        strict=True,
    )
    better = next((gain - loss for gain, loss in gains if abs(gain - loss) > MARGIN), 0.0)
    return better > 0


def horizon_of(*contenders: Contender) -> float:
    return max(_LEAST_HORIZON_S, HORIZON * max(one.wake_s for one in contenders))


def awake_value(one: Contender, levels: Sequence[int], horizon_s: float) -> list[float]:
    """Return by level, the highest first, how many of its requests miss their target if it sleeps for the horizon and wakes up
    then; and last how many requests run, wait or come within the horizon."""
    values = _values(one, levels, horizon_s, ready_s=0.0)
    return [*values, one.num_running + one.num_waiting + _num_coming(one) * horizon_s]


def asleep_value(
    one: Contender, levels: Sequence[int], horizon_s: float, drain_s: float = 0.0
) -> list[float]:
    """Return the same of a model that begins to wake up in `drain_s`: how many of these requests it serves in time."""
    ready_s = drain_s + one.wake_s
    values = _values(one, levels, horizon_s, ready_s)
    return [*values, one.num_waiting + _num_coming(one) * max(0.0, horizon_s - ready_s)]


def _values(one: Contender, levels: Sequence[int], horizon_s: float, ready_s: float) -> list[float]:
    found = dict.fromkeys(levels, 0.0)
    last_s = horizon_s + one.wake_s
    for lot in one.lots:
        if ready_s <= lot.left_s <= last_s:
            found[lot.priority] += lot.num
    for stream in one.streams:
        lost_s = max(0.0, last_s - stream.target_s) - max(0.0, ready_s - stream.target_s)
        found[stream.priority] += stream.rate * max(0.0, lost_s)
    return [found[level] for level in levels]


def _num_coming(one: Contender) -> float:
    return sum(stream.rate for stream in one.streams)


def _levels(contenders: Sequence[Contender]) -> list[int]:
    found = {each.priority for one in contenders for each in (*one.lots, *one.streams)}
    return sorted(found, reverse=True)


def _wanting(contenders: Sequence[Contender]) -> Iterator[Contender]:
    return (one for one in contenders if not one.holds and one.num_waiting)


def _rank(one: Contender, contenders: Sequence[Contender]) -> tuple[float, list[float]]:
    """Return what sorts models that want to wake up: those with aged requests, then by what waking them up saves."""
    values = asleep_value(one, _levels(contenders), horizon_of(*contenders))
    return (-one.age if one.is_aged else 0.0, [-value for value in values])


def _weakest_first(victims: Sequence[Contender], contenders: Sequence[Contender]) -> list[Contender]:
    levels, horizon_s = _levels(contenders), horizon_of(*contenders)
    return sorted(
        victims,
        key=lambda one: (one.age if one.is_aged else 0.0, awake_value(one, levels, horizon_s)),
    )

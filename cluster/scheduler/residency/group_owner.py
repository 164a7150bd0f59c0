"""The one that decides which of a group's models are awake (`swap_rule`), from what their schedulers tell it.

Invariants:
- A model counts as one that has memory from when it may have been told to wake up until all its instances say that they sleep,
  and no order to wake up is on its way. So nothing that is on its way can overdraw the memory.
- An owner that begins decides nothing before each scheduler has carried out an order of its own: from then on none obeys the
  owner before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from cluster.scheduler.residency.demand_rate import DemandRate
from cluster.scheduler.residency.swap_rule import ComingRequests, Contender, WaitingLot, swaps
from core.sleep_messages import GroupOrder, ModelDemand

_FIRST_WAKE_S = 5.0
"""What waking up is taken to take before any model has done so."""
_LAST_SHARE = 0.5
"""How much of a prediction the last time makes up."""


@dataclass(slots=True)
class _Book:
    """What is known of one model."""

    demand: ModelDemand
    heard_at: float
    ordered: int = 0
    """The number of the last order."""
    ordered_awake: bool = False
    rates: dict[tuple[int, float], DemandRate] = field(default_factory=dict)
    leaving_since: float = inf
    """When it was told to sleep, until it does."""
    leave_s: float = 0.0
    """How long that has taken the last times."""
    wake_s: float = 0.0
    """As it was last predicted; 0: not yet."""

    def hear(self, demand: ModelDemand, now: float) -> None:
        self.demand, self.heard_at = demand, now
        self.wake_s = demand.wake_s or self.wake_s
        if demand.state == "asleep" and self.leaving_since < inf:
            took_s, self.leaving_since = now - self.leaving_since, inf
            self.leave_s += _LAST_SHARE * (took_s - self.leave_s) if self.leave_s else took_s
        for each in demand.arrived:
            key = each.priority, each.target_s
            if key in self.rates:
                self.rates[key].note(each.num, now)
            else:
                self.rates[key] = DemandRate(each.num, now)


class GroupOwner:
    """Feed it what schedulers tell, with `now` never going back."""

    def __init__(self, models: Sequence[str], num_awake: int, epoch: int) -> None:
        """`epoch`: higher than that of any owner of the group before it."""
        self._models, self._num_awake, self._epoch = tuple(models), num_awake, epoch
        self._books: dict[str, _Book] = {}
        self._num_orders = 0
        self._has_begun = False

    def on(self, demand: ModelDemand, now: float) -> list[tuple[str, GroupOrder]]:
        """Take in what a model is asked for, and return the models that get orders."""
        if demand.model not in self._models:
            return []
        book = self._books.setdefault(demand.model, _Book(demand, now))
        book.hear(demand, now)
        epoch = demand.order[0]
        if epoch > self._epoch:  # the clock of an owner before this one was ahead
            self._epoch, self._has_begun = epoch + 1, False
            return [self._order(name, awake=None) for name in self._books]
        if epoch < self._epoch:
            return [self._order(demand.model, awake=None)]
        if demand.state == "waking" and not (book.ordered_awake or book.ordered > demand.order[1]):
            return [self._order(demand.model, awake=True)]  # some of its instances may still sleep
        if len(self._books) < len(self._models) or any(
            not self._obeys(book) for book in self._books.values()
        ):
            return []
        if not self._has_begun:
            self._has_begun = True
            if orders := self._first():
                return orders
        return self._decide(now)

    def _obeys(self, book: _Book) -> bool:
        return book.demand.order[0] == self._epoch

    def _first(self) -> list[tuple[str, GroupOrder]]:
        """Wake the first models of the table, as far as there is memory, so that the first requests need not wait."""
        held = sum(_holds(self._epoch, book) for book in self._books.values())
        sleeping = [
            name
            for name in self._models
            if not _holds(self._epoch, self._books[name]) and self._books[name].demand.state != "held"
        ]
        return [self._order(name, awake=True) for name in sleeping[: max(0, self._num_awake - held)]]

    def _decide(self, now: float) -> list[tuple[str, GroupOrder]]:
        may = [name for name in self._models if self._books[name].demand.state != "held"]
        found = swaps([self._contender(name, now) for name in may], self._num_awake)
        for name in found.sleep:
            self._books[name].leaving_since = now
        return [
            *(self._order(name, awake=False) for name in found.sleep),
            *(self._order(name, awake=True) for name in found.wake),
        ]

    def _order(self, model: str, *, awake: bool | None) -> tuple[str, GroupOrder]:
        self._num_orders += 1
        book = self._books[model]
        book.ordered, book.ordered_awake = self._num_orders, bool(awake)
        return model, GroupOrder(self._epoch, self._num_orders, awake)

    def _contender(self, name: str, now: float) -> Contender:
        book = self._books[name]
        demand, since_s = book.demand, now - book.heard_at
        rates = [(key, rate.forecast(now)) for key, rate in book.rates.items()]
        told = book.ordered > demand.order[1]
        return Contender(
            name=name,
            holds=_holds(self._epoch, book),
            may_sleep=demand.state == "serving" and demand.sleeps_in_s <= since_s and not told,
            is_leaving=demand.state == "falling asleep" or (told and not book.ordered_awake),
            lots=tuple(
                WaitingLot(priority=lot.priority, num=lot.num, left_s=lot.left_s - since_s)
                for lot in demand.waiting
            ),
            streams=tuple(
                ComingRequests(priority=priority, rate=rate, target_s=target_s)
                for (priority, target_s), rate in rates
            ),
            num_running=demand.num_running,
            age=demand.age,
            wake_s=book.wake_s or max(each.wake_s for each in self._books.values()) or _FIRST_WAKE_S,
            drain_s=book.leave_s,
        )


def _holds(epoch: int, book: _Book) -> bool:
    demand = book.demand
    told = (epoch, book.ordered) > demand.order
    return demand.state not in ("asleep", "held") or (told and book.ordered_awake)

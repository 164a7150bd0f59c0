"""How much service each tenant has had: virtual token counters (Sheng et al., Fairness in Serving LLMs, arXiv 2401.00588).

A token of output counts as `output_weight` tokens of a prompt. What a request is expected to generate is charged when it is
placed, what it generates beyond that as it comes, and what it does not is given back at its end. Counters grow by charge /
weight, so that equal counters mean service in proportion to the weights.

Equal tokens do not serve the most requests: the tenant that asks for most could be served its cheapest ones only. So shares
follow what waits, up to `slack` more than the least of them (`weighted`).

Invariant: a tenant that comes back after a pause, in which nothing of it waits or runs, begins at no less than the smallest
counter of those that wait. A pause earns nothing, and being the first to wait costs nothing."""

from collections.abc import Collection, Mapping
from math import inf
from typing import Final

from core.messages import PlaceRequest
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning

_REMEMBERED_SHARE: Final = 0.98
_MAX_REMEMBERED: Final = 4096


class ServiceGaps:
    """How far tenants whose requests wait are apart. Never changed."""

    __slots__ = ("_credit", "_least", "_most")

    def __init__(self, least: float, most: float, credit: float) -> None:
        self._least, self._most, self._credit = least, most, credit

    def num_ahead(self, counter: float) -> int:
        """Return by how many credits a tenant with this counter is ahead of the least served."""
        return int((counter - self._least) / self._credit)

    def is_behind(self, counter: float) -> bool:
        """Return whether it has had much less than the most served."""
        return self._most - counter > self._credit


class ServiceCounters:
    def __init__(self, slack: float = 0.0, tuning: SchedulerTuning = DEFAULT_TUNING) -> None:
        self._slack, self._tuning = slack, tuning
        self._counters: dict[str, float] = {}
        self._factors: dict[str, float] = {}
        """Tenant -> factor on its weight."""
        self._num_running: dict[str, int] = {}
        """Tenant -> its placed requests, while there are any."""
        self._usual_charge = 0.0
        """A request's charge, by weight, in the mean of the last ones."""

    def of(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def gaps(self, waiting: Collection[str]) -> ServiceGaps:
        """Return how far the tenants `waiting` are apart. One alone is never ahead or behind."""
        counters = [self.of(tenant) for tenant in waiting]
        if len(counters) < 2 or not self._usual_charge:
            return ServiceGaps(0.0, 0.0, inf)
        return ServiceGaps(min(counters), max(counters), self._tuning.credit * self._usual_charge)

    def weighted(self, waiting_work: Mapping[str, float]) -> dict[str, float]:
        """Set each tenant's factor on its weight: the ratio of its waiting work (by weight) to the least, at most 1 + slack.
        Returns them."""
        least = min(waiting_work.values())
        most = 1 + self._slack
        self._factors = {t: min(most, work / least) if least else 1.0 for t, work in waiting_work.items()}
        return self._factors

    def raise_floor(self, tenant: str, waiting: Collection[str]) -> None:
        """Raise the counter of `tenant`, which begins to wait beside the tenants `waiting`. One that has requests running has not
        paused: what it is behind by a few requests it stays behind."""
        own = self._counters.pop(tenant, 0.0)
        if waiting:
            stays = self._tuning.credit * self._usual_charge if self._num_running.get(tenant) else 0.0
            own = max(own, min(self.of(other) for other in waiting) - stays)
        elif self._counters:
            own = max(own, min(self._counters.values()))
        self._counters[tenant] = own
        if len(self._counters) > _MAX_REMEMBERED:
            idle = next(name for name in self._counters if name not in waiting and name != tenant)
            del self._counters[idle]

    def placed(self, place: PlaceRequest, expected_tokens: float) -> None:
        """Charge a placed request to its tenant: its prompt, unless that was charged before, and the output that is expected. It
        runs until `ended`."""
        self._num_running[place.tenant] = self._num_running.get(place.tenant, 0) + 1
        if place.attempt == 0:
            self._counters[place.tenant] = self.of(place.tenant) + self.prompt_charge(place)
            charge = (place.num_tokens + self._tuning.output_weight * expected_tokens) / weight(place)
            share = _REMEMBERED_SHARE if self._usual_charge else 0.0
            self._usual_charge = share * self._usual_charge + (1 - share) * charge
        self.charge(place, expected_tokens)

    def ended(self, place: PlaceRequest) -> None:
        """Note that a placed request runs no more."""
        self._num_running[place.tenant] -= 1
        if not self._num_running[place.tenant]:
            del self._num_running[place.tenant]

    def charge(self, place: PlaceRequest, num_output_tokens: float) -> None:
        """Charge a placed request's output to its tenant. A negative number gives back what was charged too much."""
        charge = self._tuning.output_weight * num_output_tokens / self._weight(place)
        self._counters[place.tenant] = self.of(place.tenant) + charge

    def prompt_charge(self, place: PlaceRequest) -> float:
        return place.num_tokens / self._weight(place)

    def _weight(self, place: PlaceRequest) -> float:
        return weight(place) * self._factors.get(place.tenant, 1.0)


def weight(place: PlaceRequest) -> float:
    return place.weight * place.slo.weight

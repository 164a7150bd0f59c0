"""How much service each tenant has had: virtual token counters (Sheng et al., Fairness in Serving LLMs, arXiv 2401.00588).

A token of output counts as OUTPUT_WEIGHT tokens of a prompt. What a request is expected to generate is charged when it is placed
and corrected when it ends. Counters grow by charge / weight, so that equal counters mean service in proportion to the weights.

Equal tokens do not serve the most requests: the tenant that asks for most could be served its cheapest ones only. So shares
follow what waits, up to `slack` more than the least of them (`weighted`).

Invariant: a tenant that comes back after a pause begins at no less than the smallest counter of those that wait. A pause earns
nothing, and being the first to wait costs nothing."""

from collections.abc import Collection, Mapping
from typing import Final

from core.messages import Place

OUTPUT_WEIGHT: Final = 2.0
_MAX_REMEMBERED: Final = 4096


class ServiceCounters:
    def __init__(self, slack: float = 0.0) -> None:
        self._slack = slack
        self._counters: dict[str, float] = {}
        self._factors: dict[str, float] = {}
        """Tenant -> factor on its weight."""

    def of(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def weighted(self, waiting_work: Mapping[str, float]) -> dict[str, float]:
        """Set each tenant's factor on its weight: the ratio of its waiting work (by weight) to the least, at most 1 + slack.
        Returns them."""
        least = min(waiting_work.values())
        most = 1 + self._slack
        self._factors = {t: min(most, work / least) if least else 1.0 for t, work in waiting_work.items()}
        return self._factors

    def raise_floor(self, tenant: str, waiting: Collection[str]) -> None:
        """Raise the counter of `tenant`, which begins to wait beside the tenants `waiting`."""
        own = self._counters.pop(tenant, 0.0)
        if waiting:
            own = max(own, min(self.of(other) for other in waiting))
        elif self._counters:
            own = max(own, min(self._counters.values()))
        self._counters[tenant] = own
        if len(self._counters) > _MAX_REMEMBERED:
            idle = next(name for name in self._counters if name not in waiting and name != tenant)
            del self._counters[idle]

    def charge(self, place: Place, num_output_tokens: float) -> None:
        """Charge a placed request's output to its tenant. A negative number gives back what was charged too much."""
        charge = OUTPUT_WEIGHT * num_output_tokens / self._weight(place)
        self._counters[place.tenant] = self.of(place.tenant) + charge

    def charge_prompt(self, place: Place) -> None:
        self._counters[place.tenant] = self.of(place.tenant) + self.prompt_charge(place)

    def prompt_charge(self, place: Place) -> float:
        return place.num_tokens / self._weight(place)

    def _weight(self, place: Place) -> float:
        return weight(place) * self._factors.get(place.tenant, 1.0)


def weight(place: Place) -> float:
    return place.weight * place.slo.weight

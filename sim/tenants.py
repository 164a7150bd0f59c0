"""Tenants under simulation: what the configuration says of each, and what it may begin (as cluster/ingress/tenants/account.py).

A tenant that the configuration does not name has weight 1, the class of everybody, and no limits. Output is paid for as it is
delivered in the full simulation, and at its end in the coarse one."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from cluster.ingress.tenants.use_limits import Excess, Limited, Need, limits_of, needs_to_begin
from core.config.live_config import TenantConfig
from core.limit_book import SlidingWindow
from core.limit_messages import Limit
from core.types import Request, Slo

_UNKNOWN = TenantConfig()


class Tenants:
    """`by_name` and `classes` as in the configuration; `everybody`: the class of those without one."""

    def __init__(
        self, by_name: Mapping[str, TenantConfig], classes: Mapping[str, Slo], everybody: Slo
    ) -> None:
        self._by_name, self._classes, self._everybody = by_name, classes, everybody

    def slo_of(self, tenant: str) -> Slo:
        """Return the class that a tenant's requests have when they name none."""
        names = self._by_name.get(tenant, _UNKNOWN).slo_classes
        return self._classes[names[0]] if names else self._everybody

    def named(self, request: Request) -> Request:
        """Return the request with its tenant's class and weight."""
        rules = self._by_name.get(request.tenant, _UNKNOWN)
        return replace(request, slo=self.slo_of(request.tenant), weight=rules.weight)

    def rules_of(self, tenant: str) -> TenantConfig:
        return self._by_name.get(tenant, _UNKNOWN)


class TenantGate:
    """What all ingresses together let in. What `begin` has let in must be ended with `end`."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._taken = defaultdict[Limit, SlidingWindow](SlidingWindow)
        self._running = Counter[str]()

    def begin(self, tenant: str, num_prompt_tokens: int, now: float) -> Excess | None:
        """Let a request in, or say why not."""
        limited = self._limited(tenant)
        needs = [Need(limit, 1) for limit in limited.requests]
        needs += needs_to_begin([limited], 1, num_prompt_tokens, 0)
        for need in needs:
            if wait_s := self._wait_s(tenant, need, now):
                return Excess(need.limit, wait_s)
        for need in needs:
            self._taken[need.limit].add(need.amount, now)
        self._running[tenant] += 1
        return None

    def spend(self, tenant: str, num_tokens: int, now: float) -> None:
        for limit in self._limited(tenant).tokens:
            self._taken[limit].add(num_tokens, now)

    def end(self, tenant: str) -> None:
        self._running[tenant] -= 1

    def _limited(self, tenant: str) -> Limited:
        return Limited(f"tenant {tenant!r}", limits_of(self._tenants.rules_of(tenant)))

    def _wait_s(self, tenant: str, need: Need, now: float) -> float:
        if need.limit.what == "sequences":
            return float(self._running[tenant] >= need.limit.most)
        return self._taken[need.limit].wait_s(max(need.amount, need.least), need.limit.most, now)

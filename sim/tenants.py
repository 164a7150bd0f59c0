"""Tenants under simulation: what the configuration says of each, and what it may begin (as cluster/ingress/tenants/access.py).

A tenant that the configuration does not name has weight 1, the class of everybody, and no limits. Output is paid for as it is
delivered in the full simulation, and at its end in the coarse one."""

from collections.abc import Mapping
from dataclasses import replace

from cluster.ingress.tenants.tenant_limits import Excess, Meter, TenantLimits
from core.config.live_config import TenantConfig
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

    def limits_of(self, tenant: str) -> TenantLimits:
        rules = self._by_name.get(tenant, _UNKNOWN)
        return TenantLimits(rules.max_requests_per_min, rules.max_tokens_per_min, rules.max_concurrent)


class TenantGate:
    """One ingress' meters. What `begin` has let in must be ended with `end`."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._meters: dict[str, Meter] = {}

    def begin(self, tenant: str, num_prompt_tokens: int, now: float) -> Excess | None:
        """Let a request in, or say why not."""
        meter = self._meters.get(tenant)
        if meter is None:
            meter = self._meters[tenant] = Meter(self._tenants.limits_of(tenant), now)
        return meter.request(now) or meter.begin(1, num_prompt_tokens, now)

    def spend(self, tenant: str, num_tokens: int, now: float) -> None:
        self._meters[tenant].spend(num_tokens, now)

    def end(self, tenant: str) -> None:
        self._meters[tenant].end(1)

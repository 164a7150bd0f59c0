"""Latencies and attainment of a run, as its clients saw them.

Every offered request counts. One that was refused, or that has no end, missed its targets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from core.types import Slo
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseOutcome
from sim.simulated_run import Arrival, Outcome
from sim.tenants import Tenants

_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Times count from the arrival at `at`, and are infinite for what did not happen."""

    at: float
    ttft_s: float
    e2e_s: float
    num_output: int
    tenant: str = ""
    slo: Slo | None = None
    """Its own class, where not all are of one."""

    @property
    def tpot_s(self) -> float:
        """Mean gap between tokens after the first."""
        return (
            (self.e2e_s - self.ttft_s) / max(1, self.num_output - 1)
            if math.isfinite(self.e2e_s)
            else math.inf
        )

    def holds(self, everybody: Slo) -> bool:
        """Return whether it held the targets of its class, or `everybody`'s."""
        slo = self.slo or everybody
        return self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


def served_in_full(
    arrivals: Sequence[Arrival], outcome: Outcome, tenants: Tenants | None = None
) -> list[ServedRequest]:
    rows = zip(
        arrivals,
        outcome.arrived_at,
        outcome.first_token_at,
        outcome.last_token_at,
        outcome.tokens,
        strict=True,
    )
    return [
        ServedRequest(
            at,
            first_at,
            last_at,
            len(tokens),
            tenant=arrival.tenant,
            slo=tenants and tenants.slo_of(arrival.tenant),
        )
        for arrival, at, first_at, last_at, tokens in rows
    ]


def served_coarsely(outcome: CoarseOutcome) -> list[ServedRequest]:
    return [served_job(job) for job in outcome.jobs]


def served_job(job: SimulatedRequest) -> ServedRequest:
    request = job.request
    at = request.arrival_at
    return ServedRequest(
        at, job.first_at - at, job.last_at - at, job.num_output, tenant=request.tenant, slo=request.slo
    )


def by_tenant(served: Sequence[ServedRequest], slo: Slo) -> dict[str, dict[str, float]]:
    """Return each tenant's figures, who asked for most first."""
    own: dict[str, list[ServedRequest]] = {}
    for one in served:
        own.setdefault(one.tenant, []).append(one)
    return {
        tenant: {
            "num_offered": len(asked),
            "num_finished": sum(math.isfinite(one.e2e_s) for one in asked),
            "attainment": attainment(asked, slo),
            "ttft_p50_ms": quantiles_ms([one.ttft_s for one in asked]).get("p50", math.inf),
            "ttft_p99_ms": quantiles_ms([one.ttft_s for one in asked]).get("p99", math.inf),
            "output_tokens": sum(one.num_output for one in asked),
        }
        for tenant, asked in sorted(own.items(), key=lambda item: -len(item[1]))
    }


def attainment(served: Sequence[ServedRequest], slo: Slo) -> float:
    return sum(one.holds(slo) for one in served) / len(served) if served else 1.0


def crowd(served: Sequence[ServedRequest]) -> list[tuple[float, int, int]]:
    """Return (time, requests before their first token, requests that decode) at every moment at which either changes.

    A request that was refused or never finished is not counted from its arrival, or its first token, on."""
    changes: dict[float, tuple[int, int]] = {}

    def change(at: float, waiting: int, decoding: int) -> None:
        before = changes.get(at, (0, 0))
        changes[at] = before[0] + waiting, before[1] + decoding

    for one in served:
        if math.isfinite(one.ttft_s):
            change(one.at, 1, 0)
            change(one.at + one.ttft_s, -1, int(math.isfinite(one.e2e_s)))
        if math.isfinite(one.e2e_s):
            change(one.at + one.e2e_s, 0, -1)
    waiting = decoding = 0
    result = [(0.0, 0, 0)]
    for at in sorted(changes):
        waiting, decoding = waiting + changes[at][0], decoding + changes[at][1]
        result.append((at, waiting, decoding))
    return result


def quantiles_ms(values_s: Sequence[float]) -> dict[str, float]:
    """Quantiles of the finite values, by nearest rank."""
    ordered = sorted(value for value in values_s if math.isfinite(value))
    if not ordered:
        return {}
    mean = {"mean": sum(ordered) / len(ordered) * 1e3}
    return mean | {
        f"p{q * 100:g}": ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3 for q in _QUANTILES
    }


def figures(served: Sequence[ServedRequest], slo: Slo) -> dict[str, object]:
    span_s = max((one.at + one.e2e_s for one in served if math.isfinite(one.e2e_s)), default=0.0)
    output_tokens = sum(one.num_output for one in served)
    return {
        "num_offered": len(served),
        "num_finished": sum(math.isfinite(one.e2e_s) for one in served),
        "ttft_ms": quantiles_ms([one.ttft_s for one in served]),
        "tpot_ms": quantiles_ms([one.tpot_s for one in served if one.num_output > 1]),
        "e2e_ms": quantiles_ms([one.e2e_s for one in served]),
        "attainment": attainment(served, slo),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / span_s if span_s else 0.0,
    }

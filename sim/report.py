"""What a run was like for its clients: latencies and attainment. Pure.

Every offered request counts. One that was refused, or that has no end, missed its targets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from core.types import Slo
from sim.coarse.world import CoarseOutcome
from sim.run import Arrival, Outcome

_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Served:
    """Times count from the arrival at `at_s`, and are infinite for what did not happen."""

    at_s: float
    ttft_s: float
    e2e_s: float
    num_output: int

    @property
    def tpot_s(self) -> float:
        """Mean gap between tokens after the first."""
        return (
            (self.e2e_s - self.ttft_s) / max(1, self.num_output - 1)
            if math.isfinite(self.e2e_s)
            else math.inf
        )

    def holds(self, slo: Slo) -> bool:
        return self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


def served_in_full(arrivals: Sequence[Arrival], outcome: Outcome) -> list[Served]:
    rows = zip(arrivals, outcome.first_token_s, outcome.last_token_s, outcome.tokens, strict=True)
    return [Served(arrival.at_s, first_s, last_s, len(tokens)) for arrival, first_s, last_s, tokens in rows]


def served_coarsely(outcome: CoarseOutcome) -> list[Served]:
    return [
        Served(at_s, job.first_s - at_s, job.last_s - at_s, job.num_output)
        for job in outcome.jobs
        for at_s in [job.request.arrival_s]
    ]


def attainment(served: Sequence[Served], slo: Slo) -> float:
    return sum(one.holds(slo) for one in served) / len(served) if served else 1.0


def quantiles_ms(values_s: Sequence[float]) -> dict[str, float]:
    """Of the finite ones; nearest rank."""
    ordered = sorted(value for value in values_s if math.isfinite(value))
    if not ordered:
        return {}
    mean = {"mean": sum(ordered) / len(ordered) * 1e3}
    return mean | {
        f"p{q * 100:g}": ordered[min(len(ordered) - 1, int(q * len(ordered)))] * 1e3 for q in _QUANTILES
    }


def figures(served: Sequence[Served], slo: Slo) -> dict[str, object]:
    span_s = max((one.at_s + one.e2e_s for one in served if math.isfinite(one.e2e_s)), default=0.0)
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

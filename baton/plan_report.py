"""What `baton plan` says of a plan: one sentence with the finding, and everything as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from sim.planning.plan_load import Columns, PeakLoad
from sim.planning.plan_trial import Trial
from sim.planning.planner import Demand, Plan


@dataclass(frozen=True, slots=True)
class PlanFinding:
    """A plan and what it was for."""

    demand: Demand
    plan: Plan

    @property
    def dollars_per_million_tokens(self) -> float | None:
        """Return the answer's price for a million tokens of prompts and answers, at the load's mean over the trace."""
        if self.plan.best is None:
            return None
        per_s = tokens_per_s(self.demand.whole) * self.demand.targets.copies
        return self.plan.best.dollars_per_h / (per_s * 3600) * 1e6

    @property
    def sentence(self) -> str:
        wanted, plan, best = self.demand.targets, self.plan, self.plan.best
        targets = f"{wanted.slo.ttft_s:g} s to the first token and {wanted.slo.tpot_s * 1e3:g} ms a token"
        hopeless = f"{plan.hopeless_share:.2%} of the requests no idle instance could serve in time"
        if best is None:
            return (
                f"no fleet of up to {wanted.max_instances} instances was found that holds {targets} for "
                f"{wanted.attainment:.0%}; {hopeless}" + (f"; {self._left}" if plan.num_left else "")
            )
        rank = "cheapest found" if plan.num_left else "cheapest"
        words = [
            f"{best.name} at ${best.dollars_per_h:.2f}/h (${self.dollars_per_million_tokens:.3f} for a million tokens) is the "
            f"{rank} that holds {targets} for {wanted.attainment:.0%} where the load is heaviest ({best.attained:.1%} there)"
        ]
        if plan.headroom is not None:
            words.append(str(plan.headroom))
        if plan.hopeless_share:
            words.append(hopeless)
        if plan.num_left:
            words.append(self._left)
        return "; ".join(words)

    @property
    def _left(self) -> str:
        num_left = self.plan.num_left
        kinds = "kind of fleet was" if num_left == 1 else "kinds of fleets were"
        return f"{num_left} {kinds} not searched to the end"


def tokens_per_s(columns: Columns) -> float:
    span_s = float(columns.at[-1] - columns.at[0]) if len(columns) > 1 else 0.0
    return columns.tokens / max(1.0, span_s)


def as_json(finding: PlanFinding) -> dict[str, Any]:
    plan = finding.plan
    headroom = plan.headroom
    return {
        "finding": finding.sentence,
        "best": plan.best and plain(plan.best),
        "dollars_per_million_tokens": finding.dollars_per_million_tokens,
        "headroom": headroom and {"held": headroom.held, "broken": headroom.broken},
        "hopeless_share": plan.hopeless_share,
        "unable": list(plan.unable),
        "num_left": plan.num_left,
        "windows": [window(load) for load in finding.demand.loads],
        "trials": [plain(trial) for trial in plan.trials],
    }


def plain(trial: Trial) -> dict[str, Any]:
    return {
        "name": trial.name,
        "parts": [
            {
                "gpu": part.gpu,
                "tp": part.tp,
                "pp": part.pp,
                "prefill": part.num_prefill,
                "decode": part.num_decode,
                "both": part.num_both,
                "shares": part.shares and asdict(part.shares),
            }
            for part in trial.parts
        ],
        "dollars_per_h": trial.dollars_per_h,
        "attained": trial.attained,
        "attainments": list(trial.attainments),
        "limit": trial.limit,
        "busy_share": trial.busy_share,
    }


def window(load: PeakLoad) -> dict[str, Any]:
    return {
        "why": load.why,
        "start_s": load.start_at,
        "seconds": load.duration_s,
        "requests": len(load.columns),
    }

"""Simulations that go through all that the coarse one does; what comes of them, as text. Run by interpreted and compiled code."""

from hashlib import sha256

from core.types import Slo
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.multi_scheduler import several
from sim.coarse.world import CoarseConfig, CoarseOutcome, MakeScheduler, production, simulate
from tests.sim.random_rows import random_rows

FLEETS: dict[str, tuple[CoarseConfig, MakeScheduler]] = {
    "pools that preempt": (CoarseConfig(num_prefill=1, num_decode=2, num_blocks=24), production),
    "any role that evicts": (
        CoarseConfig(num_prefill=0, num_decode=0, num_both=2, num_blocks=60),
        production,
    ),
    "both, no lookahead": (
        CoarseConfig(num_prefill=1, num_decode=1, num_both=2, num_blocks=100, lookahead=False),
        production,
    ),
    "a large fleet": (CoarseConfig(num_prefill=0, num_decode=0, num_both=40, num_blocks=100), production),
    "several schedulers": (CoarseConfig(num_prefill=2, num_decode=4, num_blocks=100), several(3, 4)),
}


def outcomes() -> dict[str, str]:
    """By fleet: a digest of every decision and every time to the last bit, and how many there were."""
    found: dict[str, str] = {}
    for name, (config, make) in FLEETS.items():
        work = jobs(
            Load(rows=random_rows(7, 150, 30.0), duration_s=1e9),
            Slo(name="chat", ttft_s=1.0, tpot_s=0.05),
            64,
        )
        found[name] = _digest(simulate(config, work, make))
    return found


def _digest(outcome: CoarseOutcome) -> str:
    times = [(job.first_at, job.last_at, job.num_output, job.rejected) for job in outcome.jobs]
    rest = (outcome.num_events, outcome.num_steps, outcome.busy_share)
    digest = sha256(repr((outcome.decisions, times, rest)).encode()).hexdigest()
    return f"{digest} {len(outcome.decisions)} {outcome.num_events}"

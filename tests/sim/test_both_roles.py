"""Production instances that do both roles: every request is served, by whoever suits it, and all books close."""

import math

from core.types import Slo
from sim.catalogue.cost import StepCost
from sim.simulated_cluster import simulate
from sim.simulated_run import SimConfig
from sim.trace_workload import arrivals
from sim.virtual_loop import run_virtual
from tests.sim.random_rows import random_rows

STEP = StepCost(overhead_s=0.002, tokens_per_s=20_000.0, weights_read_s=0.006, kv_token_read_s=5e-8)


def test_instances_that_do_both_serve_everything_and_change_roles_by_the_load() -> None:
    work = arrivals(random_rows(3, 150, 40.0), 1e9)
    config = SimConfig(
        num_prefill=0, num_decode=0, num_blocks=4000, step=STEP, num_both=3, slo=Slo(ttft_s=2.0, tpot_s=0.02)
    )
    outcome = run_virtual(simulate(config, work))
    assert [len(tokens) for tokens in outcome.tokens] == [arrival.max_tokens for arrival in work]
    assert all(math.isfinite(end_at) for end_at in outcome.last_token_at)
    placed = [line.split()[2:] for line in outcome.decisions if line.startswith("place")]
    assert len({decode for _, decode in placed}) >= 2
    tpot_s = [
        (last - first) / max(1, len(tokens) - 1)
        for first, last, tokens in zip(
            outcome.first_token_at, outcome.last_token_at, outcome.tokens, strict=True
        )
    ]
    assert sum(value <= 0.02 for value in tpot_s) >= 0.9 * len(work)

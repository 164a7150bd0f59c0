"""Tenants under overload: equal service for unequal demand, at a cost in goodput that is bounded here and not yet the 2 % that it should be."""

import dataclasses
import random

from core.types import Request, SamplingParams, Slo
from sim.coarse.sequence import Job
from sim.coarse.world import CoarseConfig, CoarseOutcome, simulate
from sim.cost import StepCost

SLO = Slo("chat", 4.0, 0.1)
SHARES = {"flood": 0.55, "second": 0.25, "third": 0.2}
"""Of the offered load. The least asks for about its fair share; together they ask for far more than there is."""
SECONDS, BLOCK = 60.0, 64


def offered(tenants: bool) -> list[Job]:
    rng, jobs = random.Random(5), list[Job]()
    at_s = 0.0
    while at_s < SECONDS:
        at_s += rng.expovariate(90.0)
        tenant = rng.choices(list(SHARES), list(SHARES.values()))[0]
        num_prompt, output = rng.randint(500, 1500), rng.randint(50, 150)
        request = Request(
            f"r{len(jobs)}", (), SamplingParams(max_tokens=output), "", SLO, arrival_s=at_s, tenant=tenant
        )
        if not tenants:
            request = dataclasses.replace(request, tenant="")
        ids = tuple(10_000 * len(jobs) + i for i in range(-(-num_prompt // BLOCK)))
        jobs.append(Job(request, ids, ids[: num_prompt // BLOCK], num_prompt))
    return jobs


def run(jobs: list[Job]) -> CoarseOutcome:
    return simulate(CoarseConfig(0, 0, 2, BLOCK, step=StepCost(0.004, 20_000.0)), jobs, until_s=SECONDS)


def good(outcome: CoarseOutcome) -> int:
    return sum(
        job.first_s - job.request.arrival_s <= SLO.ttft_s
        and job.last_s - job.first_s <= SLO.tpot_s * max(1, job.num_output - 1)
        for job in outcome.jobs
    )


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(v * v for v in values))


def test_service_is_equal_at_a_bounded_cost_in_goodput() -> None:
    fair, alone = run(offered(tenants=True)), run(offered(tenants=False))
    service = dict.fromkeys(SHARES, 0.0)
    for job in fair.jobs:
        if job.num_output:
            service[job.request.tenant] += job.num_prompt + 2 * job.num_output
    demand = {name: share * len(fair.jobs) * 1200 for name, share in SHARES.items()}
    assert sum(service.values()) < 0.8 * sum(demand.values()), "not overloaded: nothing to share"
    assert jain(list(service.values())) >= 0.95
    assert jain(list(demand.values())) < 0.85
    assert good(fair) >= 0.9 * good(alone)

"""Tenants under overload: nearly equal service for unequal demand, at a few percent of the goodput."""

import pytest

from benchmarks.goodput.fairness import good, jain, offered, run, services
from core.config.cluster_config import ScheduleConfig
from sim.outcome_report import served_coarsely

SECONDS = 20.0


@pytest.mark.slow
def test_nearly_equal_service_costs_little_goodput() -> None:
    slack = ScheduleConfig().fairness_slack
    fair = run(offered(5, SECONDS, named=True), SECONDS, slack)
    alone = run(offered(5, SECONDS, named=False), SECONDS, slack)
    service = services(fair.jobs)
    demand = dict.fromkeys(service, 0.0)
    for job in fair.jobs:
        demand[job.request.tenant] += job.num_prompt + 2 * job.max_tokens
    assert sum(service.values()) < 0.5 * sum(demand.values()), "not overloaded: nothing to share"
    assert jain([*service.values()]) >= 0.97
    assert jain([*demand.values()]) < 0.85
    assert good(served_coarsely(fair)) >= 0.96 * good(served_coarsely(alone)), "one seed"

"""A slow link is learned from what goes over it, and gets no hand-over that computing would beat."""

from dataclasses import replace

from core.types import Slo
from sim.catalogue.cost import LinkCost, StepCost
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.world import CoarseConfig, simulate
from sim.outcome_report import attainment, served_coarsely
from sim.simulated_cluster import simulate as simulate_in_full
from sim.simulated_run import Arrival, SimConfig
from sim.virtual_loop import run_virtual
from tests.sim.random_rows import random_rows

PREFILL, FAR = "loopback:prefill-3", "loopback:decode-2"
"""The decode instance that hand-overs go to while its link is quick."""


def placed(slow: float) -> list[str]:
    """Return where 40 requests went, in order, where the link to one of two decode instances carries so many bytes a second."""
    config = SimConfig(
        num_prefill=1,
        num_decode=2,
        step=StepCost(tokens_per_s=20_000.0),
        pairs={(PREFILL, FAR): LinkCost(bytes_per_s=slow)},
    )
    work = [Arrival(0.1 * i, tuple(range(2000 * i + 1, 2000 * i + 2001)), 20, i) for i in range(40)]
    outcome = run_virtual(simulate_in_full(config, work))
    return [line.partition(" ")[2] for line in outcome.decisions if line.startswith("place ")]


def test_within_twenty_requests_a_slow_link_gets_no_hand_over() -> None:
    """2000 tokens of 2 KB take 0.1 s to compute, and 4 s at 1 MB/s."""
    quick, slow = placed(50e9), placed(1e6)
    handed_over = f"{PREFILL} {FAR}"
    assert sum(line.endswith(handed_over) for line in quick[20:]) >= 3
    assert not any(line.endswith(handed_over) for line in slow[20:])
    assert len(slow) == 40, "all are served all the same"


def test_more_requests_are_in_time_where_reports_say_how_slow_links_are() -> None:
    """Links carry 0.03 GB/s, where the scheduler assumes 2.5."""
    load, slo = Load(rows=random_rows(5, 160, 20.0), duration_s=8.0, seed=1), Slo(ttft_s=1.0, tpot_s=0.06)
    config = CoarseConfig(num_prefill=2, num_decode=2, link=LinkCost(bytes_per_s=0.03e9))

    def share(reports_links: bool) -> float:
        outcome = simulate(replace(config, reports_links=reports_links), jobs(load, slo, 64), ends_at=40.0)
        return attainment(served_coarsely(outcome), slo)

    assert share(True) > 1.2 * share(False)

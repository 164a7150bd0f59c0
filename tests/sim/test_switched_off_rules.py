"""Each rule of the law of placement can be switched off, in the coarse simulation: decisions differ in its own case, and where
its case does not come they are the same, line by line. So a tuning reaches every part that decides."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.goodput.ablation_runs import change_of, tuning_of
from benchmarks.goodput.rules import RULES
from core.types import Slo
from sim.catalogue.cost import LinkCost, StepCost
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, simulate
from sim.goodput import tuned
from tests.sim.random_rows import BLOCK, random_rows

CHAT = Slo(name="chat", ttft_s=0.5, tpot_s=0.05, hopeless="refuse")
HIGH, LOW = replace(CHAT, name="high", priority=1), Slo(name="low", ttft_s=5.0, tpot_s=0.1)
STEP = StepCost(weights_read_s=0.008, kv_token_read_s=1e-6, tokens_per_s=20_000.0)
SMALL = CoarseConfig(
    num_prefill=0,
    num_decode=0,
    num_both=2,
    block_tokens=BLOCK,
    num_blocks=600,
    max_batch_tokens=512,
    max_num_seqs=16,
    asked_tokens=1024,
    step=STEP,
)
POOLS = replace(SMALL, num_prefill=2, num_decode=2, num_both=0, max_num_seqs=6)
FLEETS = {
    "quiet": replace(SMALL, num_both=1),
    "crowd": SMALL,
    "classes": SMALL,
    "tenants": SMALL,
    "hopeless": replace(SMALL, num_blocks=2000),
    "pools": POOLS,
    "short": replace(POOLS, num_decode=1),
    "lines": replace(POOLS, num_decode=1),
    "links": replace(POOLS, link=LinkCost(bytes_per_s=2e8)),
    "host": replace(SMALL, host_blocks=2000, num_blocks=300, max_num_seqs=64),
    "experts": replace(SMALL, step=replace(STEP, experts_read_s=0.02, expert_share=0.1)),
}
COUNTS = {
    "crowd": (120, 60.0),
    "quiet": (12, 1.0),
    "pools": (80, 16.0),
    "short": (80, 12.0),
    "lines": (80, 12.0),
    "links": (40, 8.0),
}
"""Requests, and how many come in a second; elsewhere more than can be in time."""


def offered(load: str) -> list[SimulatedRequest]:
    count, rate = COUNTS.get(load, (80, 60.0))
    rows = random_rows(7, count, rate)
    if load == "hopeless":
        rows = [replace(r, input_tokens=15_000) if number % 9 == 4 else r for number, r in enumerate(rows)]
    if load == "short":
        rows = [
            replace(r, input_tokens=20, prefix_ids=()) if number % 2 else r for number, r in enumerate(rows)
        ]
    classes = {"classes": (HIGH, LOW), "lines": (CHAT, replace(CHAT, name="slow", tpot_s=0.5))}
    work = jobs(Load(rows=rows, duration_s=60.0), classes.get(load, CHAT), BLOCK)
    if load in ("tenants", "lines"):
        for number, job in enumerate(work):
            job.request = replace(job.request, tenant="much" if number % 4 else "little")
    return work


@cache
def decided(load: str, rule: str) -> tuple[object, ...]:
    """Return what the scheduler decides with that rule off, and when tokens come."""
    off = next((one.off for one in RULES if one.name == rule), {})
    work = offered(load)
    outcome = simulate(change_of(off)(FLEETS[load]), work, tuned(tuning_of(off)))
    return *outcome.decisions, *((job.first_at, job.last_at) for job in work)


OWN_AND_OTHER = {
    "levels again": ("classes", "crowd"),
    "late yield": ("lines", "crowd"),
    "late last": ("short", "links"),
    "links learned": ("links", "short"),
    "links reserved": ("links", "pools"),
    "late binding": ("hopeless", "crowd"),
    "fair early lines": ("lines", "pools"),
    "short roam": ("short", "lines"),
    "spread": ("pools", "crowd"),
    "hopeless give way": ("hopeless", "crowd"),
    "running lengths": ("classes", "quiet"),
    "later contexts": ("crowd", "classes"),
}
"""Each rule that only a switch turns off -> the load that has its case, and one that has not."""


@pytest.mark.parametrize("rule", OWN_AND_OTHER)
def test_a_switch_changes_what_is_decided_in_its_own_case_and_nowhere_else(rule: str) -> None:
    own, other = OWN_AND_OTHER[rule]
    assert decided(own, rule) != decided(own, "")
    assert decided(other, rule) == decided(other, "")


def test_every_switch_of_the_tuning_has_a_case() -> None:
    off = {rule.name: rule.off for rule in RULES if "sim.knows_experts" not in rule.off}
    assert {name for name, of in off.items() if any(value is False for value in of.values())} == {
        *OWN_AND_OTHER
    }

"""Schedulers that know each other's placements from reports alone: everything is served, nobody is herded onto, prefixes spread."""

import random
from collections import Counter

import pytest

from cluster.scheduler.fleet.roster import SCAN_UP_TO
from core.config.cluster_config import ScheduleConfig
from core.kv import block_hashes
from core.types import Request, SamplingParams, Slo
from sim.catalogue.cost import StepCost
from sim.coarse.multi_scheduler import several
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, CoarseOutcome, simulate
from sim.outcome_report import attainment, served_coarsely

SLO = Slo(name="standard", ttft_s=2.0, tpot_s=0.1)
BLOCK = 64
LARGE = SCAN_UP_TO + 16


def jobs(count: int, per_s: float, shared_blocks: int) -> list[SimulatedRequest]:
    """Prompts of 20 blocks, of which the first `shared_blocks` are everybody's."""
    rng, found, at = random.Random(7), list[SimulatedRequest](), 0.0
    for number in range(count):
        at += rng.expovariate(per_s)
        ids = (*range(1, shared_blocks + 1), *(1000 * (number + 1) + i for i in range(20 - shared_blocks)))
        request = Request(
            id=f"r{number}",
            prompt=(),
            sampling=SamplingParams(max_tokens=40),
            reply_to="",
            slo=SLO,
            arrival_at=at,
        )
        found.append(
            SimulatedRequest(request=request, ids=ids, hashes=block_hashes(ids, 1), num_prompt=20 * BLOCK)
        )
    return found


def run(num_schedulers: int, any_role: bool, shared_blocks: int, per_s: float = 200.0) -> CoarseOutcome:
    half = LARGE // 2
    config = CoarseConfig(
        num_prefill=0 if any_role else half,
        num_decode=0 if any_role else half,
        num_both=LARGE if any_role else 0,
        block_tokens=BLOCK,
        num_blocks=400,
        max_batch_tokens=2048,
        step=StepCost(),
        schedule=ScheduleConfig(report_interval_s=0.1),
    )
    return simulate(
        config, jobs(600, per_s, shared_blocks), several(num_schedulers, SCAN_UP_TO), ends_at=60.0
    )


@pytest.mark.parametrize("any_role", [True, False], ids=["any role", "pools"])
@pytest.mark.parametrize("num_schedulers", [2, 4])
def test_they_serve_about_as_much_as_one(num_schedulers: int, any_role: bool) -> None:
    alone, several_ = run(1, any_role, 4), run(num_schedulers, any_role, 4)
    assert all(job.num_output == 40 for job in several_.jobs)
    assert attainment(served_coarsely(several_), SLO) >= 0.97 * attainment(served_coarsely(alone), SLO)


@pytest.mark.parametrize("num_schedulers", [1, 4])
def test_a_prefix_of_all_prompts_draws_no_herd_and_is_copied(num_schedulers: int) -> None:
    """As the conversations of Mooncake's trace, whose first block is the same."""
    outcome = run(num_schedulers, True, 12)
    computes = Counter(_computes(line) for line in outcome.decisions if line.startswith("place"))
    assert len(computes) > 0.4 * LARGE, "the prefix has come to many instances"
    assert max(computes.values()) < 3 * 600 / LARGE
    assert attainment(served_coarsely(outcome), SLO) > 0.97


def _computes(line: str) -> str:
    """Return the instance that computes the prompt, from `place KEY PREFILL DECODE`."""
    _, _, prefill, decode = line.split()
    return decode if prefill == "local" else prefill

"""An instance of the coarse simulation takes the steps that the production StepScheduler plans for the same requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from math import inf
from operator import sub
from statistics import mean

import pytest

from core.config.cluster_config import EngineConfig
from core.cost.steps import StepModels
from core.plan import Sampled, StepResult
from core.types import Slo
from decode.headroom_policy import HeadroomPolicy
from engine.planning.step_scheduler import StepScheduler
from sim.baselines.table import SCHEDULERS
from sim.catalogue.cost import StepCost, duration_s
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.learned import learned
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, simulate
from tests.sim.random_rows import random_rows

STEP = StepCost(
    overhead_s=0.01, tokens_per_s=20_000.0, weights_read_s=0.004, kv_token_read_s=2e-7, pair_s=2e-9
)
CONFIG = CoarseConfig(
    num_prefill=0, num_decode=0, num_both=1, block_tokens=16, num_blocks=4000, max_num_seqs=64, step=STEP
)
STEPS = learned(STEP, CONFIG.max_batch_tokens, CONFIG.max_num_seqs)
CHAT = Slo(name="chat", ttft_s=1.0, tpot_s=0.05, priority=1)
BULK = Slo(name="bulk", ttft_s=10.0, tpot_s=0.5)


@dataclass
class Planned:
    """One instance that plans each step when the one before it is over. With lookahead, only what was here when that one began is
    known to the plan."""

    config: CoarseConfig
    steps: StepModels = STEPS
    now: float = 0.0
    knows_s: float = 0.0
    """What has come until then is known to the next plan."""
    first_at: dict[str, float] = field(default_factory=dict[str, float])
    last_at: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        config = self.config
        engine = EngineConfig(
            block_size=config.block_tokens,
            max_batch_tokens=config.max_batch_tokens,
            max_num_seqs=config.max_num_seqs,
            speculate="none",
        )
        self.scheduler = StepScheduler(engine, config.num_blocks, 1_000_000, HeadroomPolicy())

    def serve(self, work: Sequence[SimulatedRequest]) -> None:
        """Serve requests that come here three messages after they arrive."""
        left = [(job.request.arrival_at + 3 * self.config.message_s, job) for job in work]
        while left or self.scheduler.load().num_running or self.scheduler.load().num_waiting:
            while left and left[0][0] <= self.knows_s:
                self._add(left.pop(0)[1])
            if self._take_step():
                continue
            # Nothing was known that could be computed: a plan is made as of now, or when the next request comes.
            self.now = self.knows_s = self.now if self.knows_s < self.now else left[0][0]

    def _add(self, job: SimulatedRequest) -> None:
        tokens = tuple(chain.from_iterable(map(repeat, job.ids, repeat(self.config.block_tokens))))
        self.scheduler.sequences.add(replace(job.request, prompt=tokens[: job.num_prompt]))

    def _take_step(self) -> bool:
        plan = self.scheduler.plan(self.now, self.steps)
        if plan is None:
            return False
        began_at, self.now = self.now, self.now + duration_s(STEP, plan)
        self.knows_s = began_at if self.config.lookahead else self.now
        drawn = tuple(Sampled(work.key, 0) for work in plan.work if work.samples)
        for token in self.scheduler.commit(plan, StepResult(step=plan.step, sampled=drawn), self.now):
            self.first_at.setdefault(token.request_id, self.now)
            if token.finish is not None:
                self.last_at[token.request_id] = self.now
        return True


def times(work: Sequence[SimulatedRequest], config: CoarseConfig) -> tuple[list[float], list[float]]:
    """Return each first and last token's time: in the coarse simulation, and by the production planner."""
    simulate(config, work, SCHEDULERS["round-robin"].make)
    planned = Planned(config)
    planned.serve([replace(job, num_output=0, first_at=inf, last_at=inf) for job in work])
    seen = [at for job in work for at in (job.first_at, job.last_at)]
    ids = [job.request.id for job in work]
    return seen, [
        at + config.message_s for id_ in ids for at in (planned.first_at[id_], planned.last_at[id_])
    ]


LOADS = {
    "little to do": (CONFIG, [CHAT], 2.0),
    "full batches": (CONFIG, [CHAT], 12.0),
    "more than there are slots": (replace(CONFIG, max_num_seqs=8), [CHAT], 20.0),
    "late prompts": (CONFIG, [replace(CHAT, ttft_s=0.3)], 40.0),
    "two classes": (CONFIG, [CHAT, BULK], 40.0),
    "steps that are not planned ahead": (replace(CONFIG, lookahead=False), [CHAT], 12.0),
}
SCARCE = {
    "few blocks": (replace(CONFIG, num_blocks=300), [CHAT], 12.0),
    "two classes and few blocks": (replace(CONFIG, num_blocks=300), [CHAT, BULK], 12.0),
    "two classes and few slots": (replace(CONFIG, max_num_seqs=8), [CHAT, BULK], 20.0),
}


@pytest.mark.parametrize("name", LOADS)
def test_every_token_comes_when_the_production_planner_has_it(name: str) -> None:
    config, slos, rate = LOADS[name]
    seen, planned = times(random_jobs(0, rate, slos), config)
    assert seen == pytest.approx(planned, abs=1e-9)


@pytest.mark.parametrize("name", SCARCE)
def test_outputs_take_as_long_in_the_mean_where_sequences_are_preempted(name: str) -> None:
    """A preempted sequence finds other blocks cached there: production shares the beginnings of blocks, too."""
    config, slos, rate = SCARCE[name]
    seen_at, planned_at = list[float](), list[float]()
    for seed in range(3):
        work = random_jobs(seed, rate, slos)
        seen, planned = times(work, config)
        arrived = [job.request.arrival_at for job in work]
        seen_at += map(sub, seen[1::2], arrived)
        planned_at += map(sub, planned[1::2], arrived)
    assert seen_at != planned_at
    assert mean(seen_at) == pytest.approx(mean(planned_at), rel=0.03)


def random_jobs(seed: int, rate: float, slos: Sequence[Slo]) -> list[SimulatedRequest]:
    return jobs(Load(rows=random_rows(seed, 80, rate), duration_s=1e9), slos, CONFIG.block_tokens)

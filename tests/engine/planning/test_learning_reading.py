"""An instance that is flooded with prompts from its first step on learns how long reading takes all the same."""

from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest

from core.config.cluster_config import EngineConfig
from core.cost.steps import LEARNED_STEPS, StepModels
from core.plan import Sampled, StepPlan, StepResult
from core.types import Request, SamplingParams, Slo
from decode.headroom_policy import HeadroomPolicy
from engine.planning.step_scheduler import StepScheduler
from engine.planning.step_time_fit import StepFits
from sim.catalogue.catalogue import GPUS, MODELS, step_cost
from sim.catalogue.cost import StepCost, duration_s

H100 = step_cost(GPUS["H100"], MODELS["llama-3.1-8b"])
LENGTH = 3000


class Flooded:
    """An instance for which more prompts wait than it ever computes. It begins with what `steps` say."""

    def __init__(self, cost: StepCost, lookahead: bool = False, steps: StepModels | None = None) -> None:
        config = EngineConfig(max_batch_tokens=8192, max_num_seqs=256)
        self._scheduler = StepScheduler(config, 100_000, 100_000, HeadroomPolicy())
        self._cost, self._depth = cost, 2 if lookahead else 1
        self._in_flight: deque[StepPlan] = deque()
        self._now, self._num_requests = 0.0, 0
        self.fits = StepFits(steps)

    def step(self) -> StepPlan:
        """Return the step that has ended."""
        while len(self._in_flight) < self._depth:
            while self._scheduler.load().num_waiting < 4:
                self._add()
            plan = self._scheduler.plan(self._now, self.fits.models)
            assert plan is not None
            self._in_flight.append(plan)
        plan = self._in_flight.popleft()
        took_s = duration_s(self._cost, plan)
        self._now += took_s
        sampled = tuple(Sampled(work.key, 7) for work in plan.work if work.samples)
        self._scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled), self._now)
        self.fits.observe(plan, took_s)
        return plan

    def _add(self) -> None:
        self._num_requests += 1
        first = LENGTH * self._num_requests
        request = Request(
            id=str(self._num_requests),
            prompt=tuple(range(first, first + LENGTH)),
            sampling=SamplingParams(max_tokens=200),
            reply_to="f",
            slo=Slo(ttft_s=10.0, tpot_s=0.1),
            arrival_at=self._now,
        )
        self._scheduler.sequences.add(request)


def _computes_prompts(plan: StepPlan) -> bool:
    return any(work.is_prompt_piece for work in plan.work)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("stretch", [1, 4])
def test_it_learns_how_long_the_batch_takes_that_it_has(lookahead: bool, stretch: int) -> None:
    """Also where reading takes a small part of its steps: with memory four times as quick."""
    quick = replace(GPUS["H100"], memory_bytes_per_s=stretch * GPUS["H100"].memory_bytes_per_s)
    cost = step_cost(quick, MODELS["llama-3.1-8b"])
    instance = Flooded(cost, lookahead)
    *_, plan = (instance.step() for _ in range(100))
    num_seqs = sum(not work.is_prompt_piece for work in plan.work)
    assert num_seqs > 5
    context = num_seqs * (LENGTH + 50)
    assert instance.fits.models.decode.num_steps >= LEARNED_STEPS
    true_s = cost.step_s(num_seqs, context, context, num_seqs)
    assert instance.fits.models.decode.step_s(num_seqs, context, num_seqs) == pytest.approx(true_s, rel=0.1)


@pytest.mark.parametrize("lookahead", [False, True])
def test_prompts_go_on_meanwhile_and_afterwards_in_every_step(lookahead: bool) -> None:
    instance = Flooded(H100, lookahead)
    steps = [_computes_prompts(instance.step()) for _ in range(100)]
    assert not all(steps[:40])
    assert all(now or then for now, then in pairwise(steps)), "at least every second one"
    assert all(steps[2 * LEARNED_STEPS + 4 :])


def test_one_that_knows_its_steps_computes_prompts_in_every_step() -> None:
    known = Flooded(H100)
    for _ in range(100):
        known.step()
    instance = Flooded(H100, steps=known.fits.models)
    assert all(_computes_prompts(instance.step()) for _ in range(60))

"""Nobody beats the clairvoyant bound, and a run that is cut short says what the whole one would."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from baton.bench.traces import TraceRow
from benchmarks.goodput.search import highest
from core.types import Slo
from sim.baselines.table import SCHEDULERS
from sim.bound import EngineBound, Needs
from sim.catalogue.cost import StepCost
from sim.catalogued import Fleet, engine_of
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.goodput import Window, attained
from tests.sim.random_rows import random_rows

SLO = Slo(name="test", ttft_s=0.5, tpot_s=0.05)
COST = StepCost(overhead_s=0.002, tokens_per_s=10_000.0, weights_read_s=0.008, kv_token_read_s=1e-5)
QUICK = replace(COST, tokens_per_s=1e9)
ENGINE = EngineBound(COST, 256, 10**6)


@pytest.mark.parametrize("seed", [2, 3])
def test_no_scheduler_beats_the_bounds(seed: int) -> None:
    """Not the window's own at any rate; a little above that of the long run only by what the tail of a short window gives."""
    part = Window(random_rows(seed, 100, 20.0), 0.0, 4.0, 64)
    fleet = Fleet(gpu="L40S", model="llama-3.1-8b", num_prefill=0, num_decode=0, num_both=1)

    def needs(copies: float) -> Needs:
        return Needs(jobs(part.load(copies, 0), SLO, 64), engine_of(fleet, 64), 64)

    sustained = part.duration_s / needs(1.0).least_s(0.9)
    ever = highest(lambda copies: float(needs(copies).can_ever_be(0.9, 1)), 1.0, sustained, 1.01, 24)
    assert ever > 0.8 * sustained
    for entry in (SCHEDULERS["sarathi"], SCHEDULERS["baton"]):
        found = highest(
            lambda copies, entry=entry: attained(part, copies, 0, SLO, fleet=fleet, entry=entry), 0.9, ever
        )
        assert 0.1 * ever < found < ever
        assert found < 1.5 * sustained


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_was_cut_short_would_have_missed(seed: int) -> None:
    """Whether it is at least 90 % is never another answer, and what it then says is exact; below it is a bound."""
    part = Window(random_rows(seed, 400, 20.0), 0.0, 10.0, 64)
    fleet = Fleet(gpu="L40S", model="llama-3.1-8b", num_prefill=0, num_decode=0, num_both=1)
    above = set[bool]()
    for copies in (0.8, 1.6, 2.4, 6.0):
        whole = attained(part, copies, seed, SLO, fleet=fleet, entry=SCHEDULERS["sarathi"])
        cut = attained(part, copies, seed, SLO, fleet=fleet, entry=SCHEDULERS["sarathi"], least=0.9)
        assert cut == whole if whole >= 0.9 else whole <= cut < 0.9
        above.add(whole >= 0.9)
        if copies == 6.0:
            assert cut > whole, "it was not cut"
    assert above == {True, False}


def test_dearer_requests_are_given_up_first() -> None:
    needs = Needs(_jobs([10] * 9 + [2000]), ENGINE, 64)
    assert needs.least_s(0.9) == pytest.approx(Needs(_jobs([10] * 9), ENGINE, 64).least_s(1.0))
    assert needs.least_s(0.9) < 0.1 * needs.least_s(1.0)


def test_hopeless_requests_use_up_what_may_miss() -> None:
    """A prompt that an idle instance cannot compute in time: nobody dear is given up beside it, and of two one is too many."""
    one = Needs(_jobs([10] * 8 + [2000, 20_000]), ENGINE, 64)
    assert one.least_s(0.9) == pytest.approx(Needs(_jobs([10] * 8 + [2000]), ENGINE, 64).least_s(1.0))
    two = Needs(_jobs([10] * 8 + [20_000] * 2), ENGINE, 64)
    assert two.least_s(0.9) == inf
    assert two.least_s(0.9) > 100 * 1e9
    assert not two.can_ever_be(0.9, 100)
    assert two.least_s(0.8) <= 1e9
    assert two.can_ever_be(0.8, 1)


def test_requests_are_bounded_by_the_targets_of_their_own_class() -> None:
    """2000 tokens take 202 ms: too long for every second one."""
    classes = (replace(SLO, ttft_s=0.2), replace(SLO, ttft_s=10.0))
    rows = [TraceRow(arrival_at=0.0, input_tokens=2000, output_tokens=2)] * 10
    needs = Needs(jobs(Load(rows=rows, duration_s=1.0), classes, 64), ENGINE, 64)
    assert needs.can_ever_be(0.5, 1)
    assert not needs.can_ever_be(0.6, 100)


@pytest.mark.parametrize(
    ("num_prompt", "engine", "token_s"),
    [
        (100, EngineBound(QUICK, 8, 10**6), 0.001 + 0.010 / 8),
        (100, EngineBound(QUICK, 256, 404), 0.001 + 0.010 / 4),
        (1000, EngineBound(QUICK, 256, 10**6), 0.010 + 0.010 / 4),
    ],
)
def test_a_token_takes_its_share_of_the_fullest_step(
    num_prompt: int, engine: EngineBound, token_s: float
) -> None:
    """By hand: as many such sequences as there are slots; as the blocks hold; as 10 ms + 10 ms each let 50 ms hold."""
    least_s = Needs(_jobs([num_prompt]), engine, 64).least_s(1.0)
    assert least_s == pytest.approx(token_s, rel=0.02)


def test_what_is_due_by_some_time_must_have_been_done_by_then() -> None:
    """Ten prompts of 90 ms each, all due at 0.5 s: one instance has no time for them, however long it is idle later."""
    needs = Needs(_jobs([900] * 10), ENGINE, 64)
    assert not needs.can_ever_be(1.0, 1)
    assert needs.can_ever_be(1.0, 2)
    assert needs.least_s(1.0) <= 10.0
    assert needs.can_ever_be(0.5, 1), "five may miss"


def _jobs(prompts: Sequence[int]) -> list[SimulatedRequest]:
    """All at once, each with two tokens of output, one of which is decoded."""
    rows = [TraceRow(arrival_at=0.0, input_tokens=num_tokens, output_tokens=2) for num_tokens in prompts]
    return jobs(Load(rows=rows, duration_s=1.0), SLO, 64)

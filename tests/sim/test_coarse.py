"""The coarse simulation does what the full one does, within a stated bound, and keeps its own books."""

import gc
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.bench.traces import TraceRow
from core.config.cluster_config import load
from core.kv import block_hashes
from core.types import Slo
from sim.baselines.table import SCHEDULERS
from sim.catalogue.cost import StepCost
from sim.coarse.burst import Burst
from sim.coarse.coarse_workload import Load, arriving, jobs
from sim.coarse.learned import learned
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, CoarseOutcome
from sim.coarse.world import simulate as coarse
from sim.simulated_cluster import simulate as full
from sim.simulated_run import Outcome, SimConfig
from sim.trace_workload import arrivals
from sim.virtual_loop import run_virtual
from tests.sim.random_rows import BLOCK, random_rows

STEP = StepCost(
    overhead_s=0.004, tokens_per_s=8000.0, weights_read_s=0.006, kv_token_read_s=2e-7, pair_s=2e-9
)
LAYERS, HEADS, DIM = 4, 8, 128
FOREVER_S = 1e9
STEPS = learned(STEP, CoarseConfig().max_batch_tokens, CoarseConfig().max_num_seqs)
"""Instances of both know from the start what those of the coarse one have learned. In the full one they learn on."""
SLO = Slo(ttft_s=2.0, tpot_s=1.0)
"""No step comes near it."""


def both(
    seed: int, rate: float, prefill: int, decode: int, blocks: int = 4000
) -> tuple[Outcome, CoarseOutcome]:
    return served(random_rows(seed, 60, rate), prefill, decode, blocks)


def served(
    rows: Sequence[TraceRow], prefill: int, decode: int, blocks: int = 4000
) -> tuple[Outcome, CoarseOutcome]:
    in_full = SimConfig(
        num_prefill=prefill,
        num_decode=decode,
        num_blocks=blocks,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        step=STEP,
        steps=STEPS,
        slo=SLO,
    )
    schedule = load(None, {}, {}).schedule
    token_bytes = 2 * LAYERS * HEADS * DIM * 2
    coarsely = CoarseConfig(
        num_prefill=prefill,
        num_decode=decode,
        num_both=0,
        block_tokens=BLOCK,
        num_blocks=blocks,
        kv_token_bytes=token_bytes,
        num_layers=LAYERS,
        step=STEP,
        schedule=schedule,
    )
    return (
        run_virtual(full(in_full, arrivals(rows, FOREVER_S))),
        coarse(coarsely, jobs(Load(rows=rows, duration_s=FOREVER_S), SLO, BLOCK)),
    )


def placed(decisions: Sequence[str]) -> list[str]:
    return [line.replace("loopback:", "") for line in decisions if line.startswith("place")]


def waited(job: SimulatedRequest) -> tuple[float, float]:
    return job.first_at - job.request.arrival_at, job.last_at - job.request.arrival_at


@pytest.mark.parametrize("last_at", [0.03, 0.06, 0.1, 0.13])
def test_a_step_has_no_prompt_that_came_after_it_was_planned(last_at: float) -> None:
    """The first two prompts fill a step each. The third is in the step behind them, which is planned when the second one's
    begins, 69 ms after the start. So the last one is in that step, too, or in the one behind it."""
    sizes = {0.0: 512, 0.02: 512, 0.025: 200, last_at: 100}
    rows = [TraceRow(arrival_at=at, input_tokens=num, output_tokens=5) for at, num in sizes.items()]
    outcome, quick = served(rows, 1, 1)
    assert placed(outcome.decisions) == placed(quick.decisions)
    assert all(" prefill-" in line for line in placed(quick.decisions))
    first, _ = zip(*map(waited, quick.jobs), strict=True)
    assert first == pytest.approx(outcome.first_token_at, abs=1e-4)


def test_the_same_decisions_and_times_where_one_choice_does_not_upset_the_next() -> None:
    """A prompt that comes within a step may be in the next one or not, so first tokens agree in the mean of all workloads."""
    first_there: list[float] = []
    first_here: list[float] = []
    for seed in range(12):
        outcome, quick = both(seed, 8.0, 1, 1)
        assert [job.num_output for job in quick.jobs] == [len(tokens) for tokens in outcome.tokens]
        there, here = placed(outcome.decisions), placed(quick.decisions)
        assert sum(a == b for a, b in zip(there, here, strict=True)) >= 52
        first, last = zip(*map(waited, quick.jobs), strict=True)
        off = sorted(abs(a - b) for a, b in zip(first, outcome.first_token_at, strict=True))
        assert off[len(off) // 2] < 0.001, (
            "half of the first tokens to the millisecond; a step takes 10 to 70"
        )
        assert statistics.mean(last) == pytest.approx(statistics.mean(outcome.last_token_at), rel=0.01)
        first_there += outcome.first_token_at
        first_here += first
    assert statistics.mean(first_here) == pytest.approx(statistics.mean(first_there), rel=0.01)


@pytest.mark.parametrize(("prefill", "decode", "blocks"), [(2, 2, 4000), (2, 2, 400), (0, 3, 4000)])
def test_the_same_latencies_in_the_mean_where_decisions_part_ways(
    prefill: int, decode: int, blocks: int
) -> None:
    """Ties between instances are decided by the last millisecond's report, so single requests differ."""
    there: list[float] = []
    here: list[float] = []
    first_there: list[float] = []
    first_here: list[float] = []
    for seed in range(3):
        outcome, quick = both(seed, 20.0, prefill, decode, blocks)
        first, last = zip(*map(waited, quick.jobs), strict=True)
        there += outcome.last_token_at
        here += last
        first_there += outcome.first_token_at
        first_here += first
    assert statistics.mean(here) == pytest.approx(statistics.mean(there), rel=0.02)
    assert statistics.mean(first_here) == pytest.approx(statistics.mean(first_there), rel=0.08)


def test_same_seed_same_outcome() -> None:
    first, second = (both(3, 20.0, 1, 2)[1] for _ in range(2))
    assert first.decisions == second.decisions
    assert list(map(waited, first.jobs)) == list(map(waited, second.jobs))


def kept_or_not(name: str, num_blocks: int) -> tuple[CoarseOutcome, CoarseOutcome]:
    """A load in which no prompt goes on from another; and the same with caches that keep it all nevertheless."""
    rows = [replace(row, prefix_ids=()) for row in random_rows(5, 150, 30.0)]
    not_kept, kept = (
        jobs(Load(rows=rows, duration_s=FOREVER_S), SLO, BLOCK),
        jobs(Load(rows=rows, duration_s=FOREVER_S), SLO, BLOCK),
    )
    assert not any(job.may_recur for job in not_kept)
    for job in kept:
        job.may_recur, job.hashes = True, block_hashes(job.hashes, 1)
    config = CoarseConfig(num_prefill=1, num_decode=2, num_both=2, block_tokens=BLOCK, num_blocks=num_blocks)
    make = SCHEDULERS[name].make
    return coarse(config, not_kept, make), coarse(config, kept, make)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_no_prompt_shares_need_not_be_kept(name: str) -> None:
    """Each instance evicts what would be as many blocks as it has, and decides and serves the same."""
    not_kept, kept = kept_or_not(name, 300)
    assert not_kept.decisions == kept.decisions
    assert list(map(waited, not_kept.jobs)) == list(map(waited, kept.jobs))


def test_nor_where_requests_are_preempted() -> None:
    not_kept, kept = kept_or_not("round-robin", 100)
    means = [statistics.mean(waited(job)[1] for job in outcome.jobs) for outcome in (not_kept, kept)]
    assert means[0] == pytest.approx(means[1], rel=0.01)


def test_jobs_that_are_made_as_they_arrive_fare_the_same() -> None:
    offered, config = (
        Load(rows=random_rows(3, 60, 30.0), duration_s=FOREVER_S),
        CoarseConfig(num_both=2, block_tokens=BLOCK),
    )
    kept = coarse(config, jobs(offered, SLO, BLOCK))
    made: list[SimulatedRequest] = []

    def one_by_one() -> Iterator[SimulatedRequest]:
        for job in arriving(offered, SLO, BLOCK):
            made.append(job)
            yield job

    outcome = coarse(config, one_by_one())
    assert outcome.jobs == ()
    assert list(map(waited, made)) == list(map(waited, kept.jobs))
    assert (outcome.decisions, outcome.busy_share) == (kept.decisions, kept.busy_share)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    blocks=st.integers(60, 300),
    prefill=st.integers(0, 2),
    both_roles=st.integers(0, 2),
    lookahead=st.booleans(),
)
def test_every_job_ends_and_the_ledger_balances(
    seed: int, blocks: int, prefill: int, both_roles: int, lookahead: bool
) -> None:
    """`simulate` checks pools and prefix trees by the production ledger; few blocks make it preempt."""
    config = CoarseConfig(
        num_prefill=prefill,
        num_decode=2,
        num_both=both_roles,
        block_tokens=64,
        num_blocks=blocks // 4,
        kv_token_bytes=131_072,
        num_layers=LAYERS,
        max_batch_tokens=512,
        max_num_seqs=64,
        step=STEP,
    )
    work = jobs(Load(rows=random_rows(seed, 40, 30.0), duration_s=FOREVER_S), Slo(ttft_s=2.0, tpot_s=0.1), 64)
    outcome = coarse(replace(config, lookahead=lookahead), work)
    for job in outcome.jobs:
        if job.rejected:
            assert math.isinf(job.last_at)
        else:
            assert job.num_output == job.max_tokens
            assert job.request.arrival_at < job.first_at <= job.last_at


@given(
    first=st.floats(1e-4, 1),
    slope=st.floats(0, 1e-2),
    count=st.integers(1, 500),
    into=st.floats(0.001, 0.999),
)
def test_a_burst_knows_its_steps(first: float, slope: float, count: int, into: float) -> None:
    burst = Burst(5.0, count, first, slope)
    for done in (0, count // 2, count - 1):
        inside = burst.elapsed_s(done) + into * (first + done * slope)
        assert burst.num_done(5.0 + inside) == done
    assert burst.num_done(burst.end_at) == count


def test_jobs_share_what_the_trace_says_at_any_block_size() -> None:
    rows = random_rows(5, 30, 10.0)
    for size in (16, 32, 64, 8):
        work = jobs(Load(rows=rows, duration_s=FOREVER_S), Slo(ttft_s=2.0, tpot_s=0.1), size)
        for a, row_a in zip(work, rows, strict=True):
            for b, row_b in zip(work, rows, strict=True):
                same = sum(x == y for x, y in zip(row_a.prefix_ids, row_b.prefix_ids, strict=False)) * BLOCK
                if a is not b:
                    shared = next(
                        (i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y),
                        min(len(a.ids), len(b.ids)),
                    )
                    assert shared == min(same, row_a.input_tokens, row_b.input_tokens) // size


def test_a_share_of_a_copy_is_that_share_of_the_load() -> None:
    rows = random_rows(6, 400, 10.0)
    work = jobs(Load(rows=rows, duration_s=40.0, copies=2.5, seed=1), Slo(ttft_s=2.0, tpot_s=0.1), 64)
    assert len(work) == pytest.approx(2.5 * sum(row.arrival_at < 40 for row in rows), rel=0.03)
    assert [job.request.arrival_at for job in work] == sorted(job.request.arrival_at for job in work)


def test_the_garbage_collector_rests_only_while_it_runs_and_has_nothing_to_do() -> None:
    found: list[int] = []

    def enough(now: float) -> bool:
        assert not gc.isenabled()
        found.append(gc.collect())
        if now > 3:
            raise KeyboardInterrupt
        return False

    config = CoarseConfig(num_prefill=1, num_decode=2, num_both=1, num_blocks=60, step=STEP)
    work = jobs(Load(rows=random_rows(8, 200, 30.0), duration_s=FOREVER_S), Slo(ttft_s=2.0, tpot_s=0.1), 64)
    gc.collect()
    gc.freeze()  # what was there before is looked through in no collection
    try:
        with pytest.raises(KeyboardInterrupt):
            coarse(config, work, enough=enough)
    finally:
        gc.unfreeze()
    assert gc.isenabled()
    assert len(found) > 2
    assert not any(found)


class _Widest:
    """A device that notes how many sequences its largest step had."""

    unread_decay = 0.0

    def __init__(self) -> None:
        self.num_seqs = 0

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        self.num_seqs = max(self.num_seqs, num_seqs)
        return STEP.step_s(num_tokens, context_tokens, num_pairs, num_seqs)


@pytest.mark.parametrize("name", ["baton", "least-loaded", "mooncake", "sarathi"])
def test_a_step_has_no_more_sequences_than_there_are_slots(name: str) -> None:
    """Also where prompts that were computed elsewhere come by the dozen, from a scheduler that does not count slots."""
    step, entry = _Widest(), SCHEDULERS[name]
    num_prefill, num_both = (1, 0) if entry.kind == "static" else (0, 2)
    config = CoarseConfig(
        num_prefill=num_prefill,
        num_decode=num_prefill,
        num_both=num_both,
        block_tokens=BLOCK,
        num_blocks=4000,
        max_batch_tokens=2048,
        max_num_seqs=4,
        step=step,
    )
    work = jobs(Load(rows=random_rows(5, 80, 40.0), duration_s=FOREVER_S), SLO, BLOCK)
    outcome = coarse(config, work, entry.make)
    assert all(job.rejected or job.num_output == job.max_tokens for job in outcome.jobs)
    assert step.num_seqs == 4 + 1, "what it learned its step times from had one more than there are slots"

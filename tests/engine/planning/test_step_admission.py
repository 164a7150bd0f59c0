"""Requests that take the whole pool, leave while they give way, or hit the same prefix for ever."""

from collections.abc import Sequence

import pytest

from core.config.cluster_config import EngineConfig
from core.plan import Sampled, StepPlan, StepResult
from core.types import Request, SamplingParams, TokenOut
from engine.cache.block_pool import BlockPool
from engine.cache.radix_cache import PrefixMatch, RadixCache
from engine.planning.step_scheduler import StepScheduler
from tests.engine.fifo_policy import FifoPolicy


def scheduler(num_blocks: int, block_size: int) -> StepScheduler:
    config = EngineConfig(block_size=block_size, max_batch_tokens=64)
    return StepScheduler(config, num_blocks, 1000, FifoPolicy())


def run(plan: StepPlan) -> StepResult:
    return StepResult(
        step=plan.step, sampled=tuple(Sampled(work.key, 40) for work in plan.work if work.samples)
    )


def finish(engine: StepScheduler, max_steps: int = 100) -> list[str]:
    keys: list[str] = []
    for _ in range(max_steps):
        if (plan := engine.plan(0.0)) is None:
            break
        keys += [token.key for token in engine.commit(plan, run(plan), 0.0) if token.finish]
        engine.check_integrity()
    return keys


def test_a_request_that_needs_the_whole_pool_is_served_although_part_of_a_block_is_cached() -> None:
    engine = scheduler(num_blocks=4, block_size=4)
    engine.sequences.add(
        Request(id="a", prompt=(1, 2, 3, 4, 5), sampling=SamplingParams(max_tokens=1), reply_to="f")
    )
    assert finish(engine) == ["a#0"]
    engine.sequences.add(
        Request(id="b", prompt=(1, 2, 9, *range(10, 22)), sampling=SamplingParams(max_tokens=1), reply_to="f")
    )
    assert finish(engine) == ["b#0"]
    assert engine.load().num_used_blocks == 0


def test_a_victim_aborted_while_its_step_is_in_flight_keeps_no_block() -> None:
    engine = scheduler(num_blocks=8, block_size=1)
    for name, prompt in (("a", (1, 2)), ("b", (3, 4))):
        engine.sequences.add(
            Request(id=name, prompt=prompt, sampling=SamplingParams(max_tokens=6), reply_to="f")
        )
    flight: list[StepPlan] = []
    preempted = False
    while not preempted:  # with lookahead, until b is neither running nor waiting but in flight
        while len(flight) < 2 and (plan := engine.plan(0.0)):
            flight.append(plan)
        preempted = engine.load().num_running == 1 and engine.load().num_waiting == 0
        if preempted:
            engine.sequences.abort("b#0")
        engine.commit(flight[0], run(flight.pop(0)), 0.0)
    for plan in flight:
        engine.commit(plan, run(plan), 0.0)
    assert finish(engine) == ["a#0"]
    assert engine.load().num_used_blocks == engine.load().num_running == engine.load().num_waiting == 0
    engine.check_integrity()


def test_hits_without_evictions_do_not_grow_the_cache() -> None:
    pool = BlockPool(4)
    cache = RadixCache(pool, 4)
    blocks = pool.take(2)
    cache.insert(list(range(8)), 2, blocks, "")
    cache.release(pool.drop([*reversed(blocks)]))
    for _ in range(100):
        match = cache.match(list(range(9)), "", partial=False)
        pool.share(match.blocks)
        cache.release(pool.drop([*reversed(match.blocks)]))
    assert cache.num_candidates <= 100


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long the prompts were that the prefix cache was asked for."""
    match, found = RadixCache.match, list[int]()

    def counted(cache: RadixCache, tokens: Sequence[int], salt: str, *, partial: bool) -> PrefixMatch:
        found.append(len(tokens))
        return match(cache, tokens, salt, partial=partial)

    monkeypatch.setattr(RadixCache, "match", counted)
    return found


SHARED = tuple(range(12))


def full(beside: tuple[int, ...], num_blocks: int = 10, reserving: Request | None = None) -> StepScheduler:
    """Fifteen steps of a request that leaves no room for one of 28 tokens, of which three blocks are cached."""
    engine = scheduler(num_blocks, block_size=4)
    engine.sequences.add(
        Request(id="before", prompt=SHARED, sampling=SamplingParams(max_tokens=2), reply_to="f")
    )
    assert finish(engine) == ["before#0"]
    engine.sequences.add(
        Request(id="beside", prompt=beside, sampling=SamplingParams(max_tokens=16), reply_to="f")
    )
    waiting = Request(
        id="waiting",
        prompt=(*SHARED, 20, 40, 40, 40, *range(60, 72)),
        sampling=SamplingParams(max_tokens=2),
        reply_to="f",
    )
    for number in range(15):
        plan = engine.plan(0.0)
        assert plan is not None
        engine.commit(plan, run(plan), 0.0)
        if reserving is not None:
            assert engine.reservations.reserve(reserving) is None
        elif number == 0:
            engine.sequences.add(waiting)
    assert reserving is not None or engine.load().num_waiting == 1
    return engine


def test_who_waits_is_not_looked_up_again_while_the_same_would_be_found(lookups: list[int]) -> None:
    engine = full(beside=tuple(range(80, 93)))
    assert lookups.count(28) == 1
    assert finish(engine) == ["beside#0", "waiting#0"]


def test_a_reservation_that_waits_is_not_looked_up_again_either(lookups: list[int]) -> None:
    request = Request(
        id="reserving", prompt=(*SHARED, *range(60, 76)), sampling=SamplingParams(max_tokens=2), reply_to="f"
    )
    full(beside=tuple(range(80, 93)), reserving=request)
    assert lookups.count(28) == 1


def test_who_waits_finds_what_was_kept_meanwhile(lookups: list[int]) -> None:
    engine = full(beside=(*SHARED, 20), num_blocks=8)
    before = engine.load().prefix_tokens[1]
    assert finish(engine) == ["beside#0", "waiting#0"]
    assert engine.load().prefix_tokens[1] - before == 16
    assert lookups.count(28) > 1


def handed_over(engine: StepScheduler, name: str, max_tokens: int) -> bool:
    """Let a sequence go on whose prompt another instance has computed. Returns False where there are no blocks for it."""
    prompt = (ord(name[0]), len(name), 7)
    request = Request(id=name, prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens), reply_to="f")
    if engine.reservations.reserve(request) is None:
        return False
    engine.reservations.activate(request.key, [TokenOut(request_id=name, attempt=0, index=0, token=40)], 0.0)
    return True


def test_sequences_from_elsewhere_wait_for_a_slot_in_the_order_in_which_they_came() -> None:
    config = EngineConfig(block_size=4, max_batch_tokens=64, max_num_seqs=2)
    engine = StepScheduler(config, 100, 1000, FifoPolicy())
    assert all(handed_over(engine, name, 6) for name in "abcde")
    ended: list[str] = []
    while (plan := engine.plan(0.0)) is not None:
        assert len(plan.work) <= 2
        ended += [token.key for token in engine.commit(plan, run(plan), 0.0) if token.finish]
        engine.check_integrity()
    assert ended == [f"{name}#0" for name in "abcde"]


def test_a_preempted_sequence_comes_back_though_others_always_wait_for_a_slot() -> None:
    config = EngineConfig(block_size=4, max_batch_tokens=64, max_num_seqs=2, prefix_cache=False)
    engine = StepScheduler(config, 13, 1000, FifoPolicy())
    ended: list[str] = []
    num_handed_over = 0
    while len(ended) < 20:
        while engine.load().num_running < 4 and handed_over(engine, f"s{'x' * num_handed_over}", 20):
            num_handed_over += 1
        plan = engine.plan(0.0)
        assert plan is not None
        ended += [token.key for token in engine.commit(plan, run(plan), 0.0) if token.finish]
        engine.check_integrity()
    assert engine.load().num_preempted
    longest_wait = num_handed_over - len(ended)
    assert longest_wait <= 5, "whoever came is served before many others that came later"
    first = {f"s{'x' * number}#0" for number in range(15)}
    assert first <= set(ended)


def test_a_step_has_the_sequences_of_each_adapter_side_by_side() -> None:
    """Others keep their order: without adapters it is the policy's."""
    engine = scheduler(num_blocks=40, block_size=4)
    for number, adapter in enumerate(("b@1", "", "a@1", "b@1", "", "a@1")):
        sampling = SamplingParams(max_tokens=3)
        engine.sequences.add(
            Request(id=str(number), prompt=(1, 2, number), sampling=sampling, reply_to="f", adapter=adapter)
        )
    while (plan := engine.plan(0.0)) is not None:
        assert [work.key[0] for work in plan.work] == ["1", "4", "2", "5", "0", "3"]
        engine.commit(plan, run(plan), 0.0)
    assert engine.load().num_used_blocks == 0

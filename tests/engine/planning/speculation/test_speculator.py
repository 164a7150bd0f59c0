import itertools
from collections.abc import Sequence as SeqOf

from hypothesis import given
from hypothesis import strategies as st

from core.config.cluster_config import EngineConfig
from core.cost.steps import StepModel, StepModels
from core.plan import Sampled, SampledToken, StepPlan, StepResult
from core.types import Request, SamplingParams
from engine.planning.sequence import Sequence
from engine.planning.speculation.acceptance import Acceptance
from engine.planning.speculation.draft_lengths import draft_lengths, longest_proposal
from engine.planning.speculation.drafter import Draft
from engine.planning.speculation.pause import Pause
from engine.planning.speculation.speculator import Speculator
from engine.planning.step_scheduler import StepScheduler
from tests.engine.fifo_policy import FifoPolicy

chances = st.lists(
    st.lists(st.floats(0.01, 1), max_size=3).map(lambda each: sorted(each, reverse=True)), max_size=3
)


@given(chances, st.floats(0.001, 1), st.floats(0, 0.5), st.integers(0, 9))
def test_so_much_is_proposed_that_no_other_choice_produces_more_a_second(
    chances: list[list[float]], step_s: float, token_s: float, limit: int
) -> None:
    def pace(lengths: SeqOf[int]) -> float:
        tokens = 3 + sum(sum(each[:count]) for each, count in zip(chances, lengths, strict=True))
        return tokens / (step_s + token_s * sum(lengths))

    found = draft_lengths(chances, 3, step_s, token_s, limit)
    every = itertools.product(*(range(len(each) + 1) for each in chances))
    best = max(pace(lengths) for lengths in every if sum(lengths) <= limit)
    assert sum(found) <= limit
    assert pace(found) >= best / 1.0501
    assert pace(found) >= pace([0] * len(chances))


@given(chances, st.floats(0.001, 1), st.floats(0, 0.5), st.integers(0, 9), st.floats(0.001, 1))
def test_a_draft_model_proposes_so_many_that_no_other_number_produces_more_a_second(
    chances: list[list[float]], step_s: float, token_s: float, limit: int, each_s: float
) -> None:
    def pace(most: int) -> float:
        cut = [each[:most] for each in chances]
        lengths = draft_lengths(cut, 3, step_s, token_s, limit, most * each_s)
        tokens = 3 + sum(sum(each[:count]) for each, count in zip(cut, lengths, strict=True))
        return tokens / (step_s + most * each_s + token_s * sum(lengths))

    found = longest_proposal(chances, 3, step_s, token_s, limit, each_s)
    assert pace(found) == max(pace(most) for most in range(4))


def test_a_draft_model_of_which_nothing_is_known_proposes_one() -> None:
    assert longest_proposal([[0.5, 0.2]], 1, 1.0, 0.1, 9, 0.0) == 1
    assert longest_proposal([[0.5, 0.2]], 1, 0.0, 0.0, 9, 1.0) == 2


def test_how_often_draft_tokens_are_right_is_learned_for_each_source_class_and_match() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe("good", "chat", 2, proposed=3, right=3)
        acceptance.observe("bad", "chat", 2, proposed=3, right=0)

    def first(source: str, slo: str, match: int) -> float:
        return acceptance.chances(source, slo, match, (1,))[0]

    assert first("good", "chat", 2) > 0.9
    assert first("bad", "chat", 2) < 0.1
    assert first("bad", "batch", 2) > 0.2, "nothing is known of that class"
    assert first("bad", "chat", 30) > 0.2, "nothing is known of such long matches"


class Right:
    """A drafter, and a rank for which token 7 follows everything."""

    def draft(self, seqs: SeqOf[Sequence], most: int) -> list[Draft | None]:
        return [Draft((7,) * most, "", 40) for _ in seqs]

    def verified(self, seq: Sequence, proposed: int, right: int) -> None: ...

    def left(self, seq: Sequence) -> None: ...


def models_of(token_s: float) -> StepModels:
    return StepModels(decode=StepModel(fixed_s=0.01, token_s=token_s, num_steps=100))


def steps_of(num_seqs: int, token_s: float, **keys: object) -> tuple[list[StepPlan], StepScheduler]:
    """All steps of `num_seqs` outputs of 300 tokens, two in flight."""
    config = EngineConfig(block_size=16, max_num_seqs=64, **keys)  # type: ignore[arg-type]
    scheduler = StepScheduler(config, 2000, 1000, FifoPolicy(), speculator=Speculator(Right(), config, 1000))
    for i in range(num_seqs):
        sampling = SamplingParams(max_tokens=300)
        scheduler.sequences.add(Request(id=str(i), prompt=(i, 5), sampling=sampling, reply_to="f"))
    plans: list[StepPlan] = []
    flight: list[StepPlan] = []
    now = 0.0
    while True:
        while len(flight) < 2 and (plan := scheduler.plan(now, models_of(token_s))):
            flight.append(plan)
        if not flight:
            return plans, scheduler
        plan = flight.pop(0)
        plans.append(plan)
        now += models_of(token_s).decode.step_s(plan.num_tokens, 0, 0)
        sampled = tuple(
            Sampled(w.key, 7, more=(SampledToken(7),) * len(w.drafts)) for w in plan.work if w.samples
        )
        scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled), now)
        scheduler.check_integrity()


def test_a_device_with_time_to_spare_computes_draft_tokens_in_nearly_every_step() -> None:
    plans, scheduler = steps_of(1, 0.0001, speculate_tokens=8)
    assert len(plans) < 300 / 9 + 20, "a few without draft tokens are measured first"
    proposed, right = scheduler.load().draft_tokens
    assert proposed == right > 250


def test_under_load_steps_are_planned_ahead_and_draft_token_next_to_nothing() -> None:
    plans, scheduler = steps_of(60, 0.01, speculate_tokens=8)
    proposed, _ = scheduler.load().draft_tokens
    assert proposed < 10
    assert len(plans) < 310


def test_a_long_pause_stays_long_where_nothing_is_found_either() -> None:
    """Where sequences are not read yet, nothing is found in them: looking often would read all of them for nothing."""
    pause = Pause()

    def length_of_next(*, any_found: bool) -> int:
        pause.tried(any_found=any_found, any_chosen=False)
        return next(steps for steps in itertools.count() if pause.is_over or pause.passed())

    assert [length_of_next(any_found=False) for _ in range(5)] == [1, 2, 4, 4, 4]
    grown = [length_of_next(any_found=True) for _ in range(6)]
    assert grown == [4, 8, 16, 32, 64, 64]
    assert [length_of_next(any_found=False) for _ in range(3)] == [64, 64, 64]


def test_draft_tokens_take_no_more_rows_than_there_are_slots_and_no_more_tokens_than_a_step_has() -> None:
    for keys, most in (({"max_batch_tokens": 40}, 40), ({"max_batch_tokens": 512}, 64)):
        plans, _ = steps_of(20, 0.0, speculate_tokens=8, **keys)
        assert max(plan.num_tokens for plan in plans) == most


def test_draft_tokens_never_take_the_last_blocks() -> None:
    config = EngineConfig(block_size=1, max_num_seqs=4)
    scheduler = StepScheduler(config, 40, 1000, FifoPolicy(), speculator=Speculator(Right(), config, 1000))
    for i in range(2):
        sampling = SamplingParams(max_tokens=18)
        scheduler.sequences.add(Request(id=str(i), prompt=(i, 5), sampling=sampling, reply_to="f"))
    while plan := scheduler.plan(0.0):
        sampled = tuple(
            Sampled(w.key, 7, more=(SampledToken(7),) * len(w.drafts)) for w in plan.work if w.samples
        )
        scheduler.commit(plan, StepResult(step=plan.step, sampled=sampled), 0.0)
    assert scheduler.load().num_preempted == 0

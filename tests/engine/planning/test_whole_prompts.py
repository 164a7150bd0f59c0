"""An encoder's steps: each text in one piece, as many together as there is room for, and none passed by for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config.cluster_config import EngineConfig
from core.errors import RequestError
from core.plan import Sampled, StepResult
from core.types import Request, SamplingParams
from engine.planning.step_scheduler import StepScheduler
from engine.planning.whole_prompts import encoder_config
from prefill.deadline_policy import DeadlinePolicy

LONGEST = 24


def scheduler(num_blocks: int, max_num_seqs: int) -> StepScheduler:
    asked = EngineConfig(block_size=4, max_batch_tokens=8, max_num_seqs=max_num_seqs)
    return StepScheduler(
        encoder_config(asked, LONGEST), num_blocks, LONGEST, DeadlinePolicy(), whole_prompts=True
    )


def text(number: int, length: int) -> Request:
    sampling = SamplingParams(max_tokens=1, pooling="mean")
    return Request(id=str(number), prompt=(5,) * length, sampling=sampling, reply_to="f", arrival_at=number)


@given(st.lists(st.integers(1, LONGEST), max_size=40), st.integers(8, 30), st.integers(1, 8), st.booleans())
def test_every_text_is_computed_whole_and_soon(
    lengths: list[int], num_blocks: int, max_num_seqs: int, ahead: bool
) -> None:
    engine = scheduler(num_blocks, max_num_seqs)
    for number, length in enumerate(lengths):
        engine.sequences.add(text(number, length))
    left, flight = dict(enumerate(lengths)), []
    while left or flight:
        while len(flight) < 1 + ahead and (plan := engine.plan(0.0)) is not None:
            assert plan.num_tokens <= LONGEST
            assert len(plan.work) <= max_num_seqs
            new = {seq.key: len(seq.tokens) for seq in plan.new}
            assert all((item.start, item.count) == (0, new[item.key]) for item in plan.work)
            flight.append(plan)
        plan = flight.pop(0)
        sampled = StepResult(step=plan.step, sampled=tuple(Sampled(item.key, 0) for item in plan.work))
        tokens = engine.commit(plan, sampled, 0.0)
        engine.check_integrity()
        assert all(token.finish for token in tokens)
        answered = {int(token.request_id) for token in tokens}
        if not ahead and left:
            assert min(left) in answered, "the one that waits for longest is in every step"
        for number in answered:
            del left[number]
    assert engine.load().num_used_blocks == 0


def test_a_text_may_be_as_long_as_the_context_and_no_longer() -> None:
    engine = scheduler(30, 4)
    engine.sequences.check_fits(text(0, LONGEST))
    with pytest.raises(RequestError, match="do not fit a context of 24"):
        engine.sequences.check_fits(text(1, LONGEST + 1))

"""Step-time models with a piece of a prompt, against trying every number of tokens."""

from dataclasses import replace
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cost.steps import PromptStepModel, StepModel, StepModels, chunk_pairs, unread_decay, with_experts

_MOST = 600
_model = st.builds(
    StepModel,
    fixed_s=st.floats(0, 0.02),
    token_s=st.floats(1e-6, 1e-3),
    context_s=st.floats(0, 1e-5),
    seq_s=st.floats(0, 1e-4),
    pair_s=st.floats(0, 1e-6),
)
_models = st.builds(StepModels, _model, _model)


def _step_s(models: StepModels, count: int, start: int) -> float:
    return models.mixed_step_s(4 + count, 1000 + start + count, 5, chunk_pairs(start, count))


@given(models=_models, start=st.integers(0, 2000), limit_s=st.floats(0, 0.5))
@settings(max_examples=100, deadline=None)
def test_the_tokens_that_fit_are_those_that_trying_all_finds(
    models: StepModels, start: int, limit_s: float
) -> None:
    model = models.beside(4, 1000, start)
    fits = [count for count in range(_MOST) if _step_s(models, count, start) <= limit_s]
    most = max(fits, default=0)
    found = model.tokens_within(limit_s)
    assert fits == [*range(most + 1)] or not fits, "steps only get longer"
    # Pairs of a token with itself are what the model leaves out: half a token.
    assert min(found, _MOST - 1) >= most
    assert min(found, _MOST - 1) <= most + 2 or _step_s(models, int(found) - 1, start) <= limit_s


@given(models=_models, start=st.integers(0, 2000))
@settings(max_examples=100, deadline=None)
def test_free_tokens_are_computed_while_the_step_reads(models: StepModels, start: int) -> None:
    model = models.beside(4, 1000, start)
    count = min(model.free_tokens, 10_000.0)
    read_s = model.reads_s + model.read_s * count
    assert count == 0 or model.step_s(count) <= read_s * (1 + 1e-6)
    if 0 < model.free_tokens < 10_000:
        assert model.step_s(2 * count + 1) > model.reads_s + model.read_s * (2 * count + 1)


def test_nothing_limits_tokens_that_take_no_time() -> None:
    assert PromptStepModel(0.01, 0.0, 0.0, 0.0, 0.0).tokens_within(0.02) == float("inf")
    assert PromptStepModel(0.01, 0.0, 0.0, 0.0, 0.0).tokens_within(0.005) == 0


ROUTED = StepModel(
    fixed_s=0.025,
    token_s=1e-5,
    context_s=1e-9,
    seq_s=2e-5,
    num_steps=50,
    unread_s=0.021,
    unread_decay=unread_decay(8 / 256),
)
"""Reading takes 4 ms and all of 256 experts 21 ms more; a token uses eight of them."""


def test_the_experts_that_tokens_use_are_read_and_no_others() -> None:
    for num_seqs in (1, 8, 64, 512):
        unread = (1 - 8 / 256) ** num_seqs
        assert ROUTED.step_s(num_seqs, 0, num_seqs) == pytest.approx(
            0.004 + 0.021 * (1 - unread) + 3e-5 * num_seqs
        )
    assert unread_decay(0.0) == unread_decay(1.0) == 0.0
    assert exp(-unread_decay(0.25, num_stages=2) * 2) == pytest.approx(0.75), (
        "a micro-batch has half of the tokens"
    )


def test_a_prompts_tokens_use_experts_too() -> None:
    models = StepModels(decode=ROUTED)
    alone_s = ROUTED.step_s(4, 1000, 4)
    few_s, many_s = (models.mixed_step_s(4 + count, 1000, 4) for count in (1, 1000))
    assert alone_s < few_s < many_s
    assert many_s == pytest.approx(0.025 + 3e-5 * 4 + 1e-6)


def test_a_piece_of_a_prompt_is_taken_to_read_all_experts() -> None:
    models = StepModels(decode=ROUTED)
    model = models.beside(4, 1000, 0)
    for count in (1, 30, 200, 4000):
        true_s = models.mixed_step_s(4 + count, 1000 + count, 5)
        assert true_s <= model.step_s(count)
        assert count < 200 or model.step_s(count) == pytest.approx(true_s, rel=1e-2)


def test_one_more_token_adds_the_experts_that_nobody_has_used_yet() -> None:
    for num_tokens in (1, 50, 1000):
        grown_s = ROUTED.step_s(num_tokens + 1, 0, 1) - ROUTED.step_s(num_tokens, 0, 1)
        assert ROUTED.one_more_s(num_tokens) == pytest.approx(grown_s)
    assert ROUTED.one_more_s(1) > 50 * ROUTED.one_more_s(1000)


def test_a_peer_that_does_not_know_of_experts_takes_all_of_them_to_be_read() -> None:
    older = replace(ROUTED, unread_s=0.0, unread_decay=0.0)
    for num_seqs in (1, 20, 100):
        assert older.step_s(num_seqs, 0, num_seqs) > ROUTED.step_s(num_seqs, 0, num_seqs)
    assert older.step_s(500, 0, 500) == pytest.approx(ROUTED.step_s(500, 0, 500))


def test_what_is_known_of_experts_is_not_forgotten() -> None:
    known = StepModels(decode=ROUTED)
    assert with_experts(known, 0.5) is known
    assert with_experts(StepModels(), 0.5).decode.unread_decay == 0.5
    assert with_experts(StepModels(), 0.0) == StepModels()

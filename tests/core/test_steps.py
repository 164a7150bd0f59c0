"""Laws of steps with a piece of a prompt, against trying every number of tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from core.steps import ChunkLaw, StepModel, StepModels, chunk_pairs

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
    law = models.beside(4, 1000, start)
    fits = [count for count in range(_MOST) if _step_s(models, count, start) <= limit_s]
    most = max(fits, default=0)
    found = law.tokens_within(limit_s)
    assert fits == [*range(most + 1)] or not fits, "steps only get longer"
    # Pairs of a token with itself are what the law leaves out: half a token.
    assert min(found, _MOST - 1) >= most
    assert min(found, _MOST - 1) <= most + 2 or _step_s(models, int(found) - 1, start) <= limit_s


@given(models=_models, start=st.integers(0, 2000))
@settings(max_examples=100, deadline=None)
def test_free_tokens_are_computed_while_the_step_reads(models: StepModels, start: int) -> None:
    law = models.beside(4, 1000, start)
    count = min(law.free_tokens, 10_000.0)
    read_s = law.reads_s + law.read_s * count
    assert count == 0 or law.step_s(count) <= read_s * (1 + 1e-6)
    if 0 < law.free_tokens < 10_000:
        assert law.step_s(2 * count + 1) > law.reads_s + law.read_s * (2 * count + 1)


def test_nothing_limits_tokens_that_take_no_time() -> None:
    assert ChunkLaw(0.01, 0.0, 0.0, 0.0, 0.0).tokens_within(0.02) == float("inf")
    assert ChunkLaw(0.01, 0.0, 0.0, 0.0, 0.0).tokens_within(0.005) == 0

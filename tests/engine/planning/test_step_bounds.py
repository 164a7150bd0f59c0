"""How long steps may take: never shorter than a device that keeps to a step-time model needs, and not much longer."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from core.cost.steps import UNKNOWN_STEPS, StepModel, StepModels
from core.plan import SeqWork, StepPlan
from engine.planning.step_bounds import PATIENCE, UNSEEN_S, WINDOW, YOUNG_STEPS, StepBounds
from engine.planning.step_time_fit import StepFits, expected_s

GRACE_S = 5.0


def step(*pieces: tuple[int, int]) -> StepPlan:
    """A step with these (start, count) of its sequences."""
    work = tuple(
        SeqWork(key=str(number), start=start, count=count, block_ids=(), samples=True)
        for number, (start, count) in enumerate(pieces)
    )
    return StepPlan(step=0, new=(), copies=(), work=work, drop=())


DECODE, PROMPT = step((100, 1)), step((0, 64))
PIECES = st.tuples(st.integers(0, 8192), st.integers(1, 8192))
STEPS = st.lists(st.lists(PIECES, min_size=1, max_size=6).map(lambda pieces: step(*pieces)), max_size=60)
DECODES = st.lists(
    st.lists(st.tuples(st.integers(0, 8192), st.just(1)), min_size=1, max_size=6).map(
        lambda pieces: step(*pieces)
    ),
    max_size=30,
)
SECONDS = st.floats(0, 1e-2, allow_subnormal=False)
MODELS = st.builds(
    StepModel,
    fixed_s=st.floats(0, 30),
    token_s=SECONDS,
    context_s=SECONDS.map(lambda s: s / 100),
    seq_s=SECONDS,
    pair_s=SECONDS.map(lambda s: s / 1e4),
)


@settings(max_examples=300, deadline=None)
@given(
    reads=MODELS.map(lambda model: replace(model, pair_s=0.0)), computes=MODELS, steps=STEPS, decodes=DECODES
)
def test_no_step_of_a_device_that_keeps_to_its_step_time_model_is_ever_late(
    reads: StepModel, computes: StepModel, steps: list[StepPlan], decodes: list[StepPlan]
) -> None:
    """Whatever the step-time model, from the first step on, and however much larger than those before it a step is."""
    models, bounds, fits = StepModels(reads, computes), StepBounds(0.0), StepFits()
    mixed = [plan for pair in zip(steps, decodes, strict=False) for plan in pair]
    for plan in (*mixed, *steps, *decodes):
        duration_s, bound_s = expected_s(plan, models), bounds.bound_s(plan, fits.models)
        assert bound_s == UNSEEN_S or duration_s <= bound_s * (1 + 1e-9)
        bounds.observe(plan, duration_s)
        fits.observe(plan, duration_s)


def test_a_size_that_was_never_seen_leaves_a_step_unbounded_though_all_before_took_no_time() -> None:
    bounds = StepBounds(0.0)
    bounds.observe(step((0, 1)), 0.0)
    assert bounds.bound_s(step((0, 2)), StepModels(StepModel(), StepModel())) == UNSEEN_S


def test_a_step_that_is_large_in_each_way_has_the_time_for_all_of_them() -> None:
    model = StepModel(token_s=1e-3, context_s=1e-5, seq_s=2e-3)
    long, deep, many = step((0, 1000)), step((100_000, 1)), step(*[(0, 1)] * 500)
    bounds = StepBounds(0.0)
    for plan in (long, deep, many):
        bounds.observe(plan, expected_s(plan, StepModels(model, model)))
    whole = step((0, 600), *[(240, 1)] * 400)
    needs_s = expected_s(whole, StepModels(model, model))
    assert needs_s > 1.5 * max(expected_s(plan, StepModels(model, model)) for plan in (long, deep, many))
    assert bounds.bound_s(whole, UNKNOWN_STEPS) >= needs_s


@given(st.floats(1e-4, 100.0))
def test_a_step_like_those_before_it_may_take_the_grace_and_four_times_the_longest(longest_s: float) -> None:
    bounds = StepBounds(GRACE_S)
    for share in (0.5, 1.0, 0.7):
        bounds.observe(DECODE, share * longest_s)
    assert bounds.bound_s(DECODE, UNKNOWN_STEPS) == GRACE_S + 4 * longest_s


def test_a_prompt_has_the_time_that_its_size_needs_on_a_slow_processor() -> None:
    bounds = StepBounds(GRACE_S)
    bounds.observe(step((0, 64)), 1.0)
    bounds.observe(step((0, 64), (64, 32)), 1.5)
    assert bounds.bound_s(step((0, 8192)), UNKNOWN_STEPS) > 8192 / 64


def test_the_first_steps_have_as_long_as_a_start() -> None:
    bounds = StepBounds(GRACE_S)
    assert bounds.bound_s(PROMPT, UNKNOWN_STEPS) == UNSEEN_S
    bounds.observe(DECODE, 0.1)
    assert bounds.bound_s(PROMPT, UNKNOWN_STEPS) == UNSEEN_S, (
        "no step has shown what computing a prompt takes"
    )
    profile = StepModels(StepModel(), StepModel(fixed_s=2.0, num_steps=100))
    assert bounds.bound_s(PROMPT, profile) == PATIENCE * GRACE_S + 4 * 2.0, "a profile has"


def test_steps_that_may_still_compile_kernels_have_longer() -> None:
    bounds = StepBounds(GRACE_S, compiles=True)
    for _ in range(YOUNG_STEPS):
        bounds.observe(PROMPT, 0.1)
    assert bounds.bound_s(DECODE, UNKNOWN_STEPS) > PATIENCE * GRACE_S
    for _ in range(YOUNG_STEPS):
        bounds.observe(DECODE, 0.1)
    assert bounds.bound_s(DECODE, UNKNOWN_STEPS) < 2 * GRACE_S


def test_steps_with_images_have_longer_since_nothing_predicts_them() -> None:
    bounds = StepBounds(GRACE_S)
    shown = replace(PROMPT, work=tuple(replace(work, has_image=True) for work in PROMPT.work))
    for _ in range(2 * YOUNG_STEPS):
        bounds.observe(shown, 0.1)
    assert bounds.bound_s(shown, UNKNOWN_STEPS) > PATIENCE * GRACE_S


def test_a_step_that_was_held_up_is_forgotten() -> None:
    bounds = StepBounds(GRACE_S)
    bounds.observe(DECODE, 40.0)
    for _ in range(WINDOW):
        bounds.observe(DECODE, 0.1)
    assert bounds.bound_s(DECODE, UNKNOWN_STEPS) > 160
    for _ in range(WINDOW):
        bounds.observe(DECODE, 0.1)
    assert bounds.bound_s(DECODE, UNKNOWN_STEPS) < 2 * GRACE_S

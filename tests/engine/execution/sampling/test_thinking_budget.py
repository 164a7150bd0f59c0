"""The end of reasoning is forced when the budget is spent, and only then."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.plan import NewSeq
from core.types import SamplingParams, ThinkingBudget
from engine.execution.batch.batch import RankSeq
from kernels.torch.reference import reference_ops
from tests.engine.execution.sampling_now import sample

THINK, END, ANSWER, VOCAB = 1, 2, 3, 8
OPENED = ThinkingBudget(max_tokens=3, begin=(), end=(END,), forced=(END, ANSWER))
UNOPENED = ThinkingBudget(max_tokens=3, begin=(THINK,), end=(END,), forced=(END, ANSWER))
OPS = reference_ops()


def generate(
    budget: ThinkingBudget | None, wanted: list[int], emitted: tuple[int, ...] = (), temperature: float = 0.0
) -> list[int]:
    """Samples until there are as many tokens as are `wanted`: position i's logits ask for the i-th of them."""
    sampling = SamplingParams(
        thinking=budget, max_tokens=len(wanted), temperature=temperature, num_logprobs=1
    )
    seq = RankSeq(NewSeq("k", (7, *emitted), 1, sampling))
    output = list(emitted)
    while len(output) < len(wanted):
        logits = torch.zeros(1, VOCAB)
        logits[0, wanted[len(output)]] = 50.0
        (sampled,) = sample(logits, ["k"], [seq], OPS)
        seq.append(sampled.token)
        output.append(sampled.token)
    return output


def test_a_spent_budget_forces_the_end_and_what_belongs_to_it() -> None:
    assert generate(OPENED, [5] * 8) == [5, 5, 5, END, ANSWER, 5, 5, 5]
    assert generate(UNOPENED, [THINK] + [5] * 7) == [THINK, 5, 5, 5, END, ANSWER, 5, 5]
    assert generate(OPENED, [5] * 8, temperature=1.0)[3:5] == [END, ANSWER]


def test_no_budget_at_all_ends_the_reasoning_at_once() -> None:
    budget = ThinkingBudget(max_tokens=0, begin=(THINK,), end=(END,), forced=(END,))
    assert generate(budget, [THINK, 5, 5]) == [THINK, END, 5]


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    assert generate(OPENED, [5, 5, END, 5, 5, 5]) == [5, 5, END, 5, 5, 5]


def test_an_answer_without_reasoning_is_left_alone() -> None:
    assert generate(UNOPENED, [5] * 8 + [THINK] + [5] * 6) == [5] * 8 + [THINK] + [5] * 6


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), st.booleans(), st.data())
def test_a_retry_goes_on_as_the_first_attempt_would_have(
    wanted: list[int], opened: bool, data: st.DataObject
) -> None:
    budget = OPENED if opened else UNOPENED
    whole = generate(budget, wanted)
    emitted = tuple(whole[: data.draw(st.integers(0, len(whole)))])
    assert generate(budget, wanted, emitted) == whole


def test_log_probabilities_stay_those_of_the_model() -> None:
    budget = ThinkingBudget(max_tokens=0, begin=(), end=(END,), forced=(END,))
    seq = RankSeq(NewSeq("k", (7,), 1, SamplingParams(thinking=budget, temperature=0.0, num_logprobs=0)))
    (sampled,) = sample(torch.zeros(1, VOCAB), ["k"], [seq], OPS)
    assert sampled.token == END
    assert sampled.logprob is not None
    assert np.isclose(sampled.logprob, -np.log(VOCAB))

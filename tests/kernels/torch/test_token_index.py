"""The choice of tokens and attention to them: PyTorch's and the batch-invariant ones against the definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.select import select_ops
from kernels.torch import token_index
from kernels.torch.token_index import highest
from tests.kernels.indexed_steps import IndexedStep, Lens

CPU = torch.device("cpu")
STEPS: dict[str, Lens] = {
    "decode": [(1, 40), (1, 9), (1, 300)],
    "prompts": [(7, 40), (1, 8), (270, 300), (3, 11)],
}


@given(
    scores=st.integers(1, 40).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(-2, 3), min_size=width, max_size=width), min_size=1, max_size=4
        )
    ),
    data=st.data(),
)
def test_the_highest_scores_and_of_equal_ones_the_first(scores: list[list[int]], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores[0])))
    want = [sorted(sorted(range(len(row)), key=lambda at, row=row: (-row[at], at))[:count]) for row in scores]
    assert highest(torch.tensor(scores, dtype=torch.float32), count).tolist() == want


@pytest.mark.parametrize("levels", [0, 2], ids=["any", "ties"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_the_chosen_tokens(lens: Lens, deterministic: bool, levels: int) -> None:
    step = IndexedStep.draw(lens, levels=levels)
    ops = select_ops(CPU, deterministic=deterministic)
    for top_k in (1, 8):
        got = ops.select_tokens(step.q, step.weights, step.pool, step.meta, top_k)
        assert torch.equal(got, step.chosen(top_k))


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_to_all_tokens_is_latent_attention(deterministic: bool) -> None:
    """A query is given as many tokens as it sees."""
    step, ops = IndexedStep.draw([(1, 40), (1, 40)]), select_ops(CPU, deterministic=deterministic)
    q, k_up, v_up = torch.randn(2, 3, 24), torch.randn(3, 16, 24), torch.randn(3, 12, 24)
    latents = step.pool
    want = ops.latent_attention(q, latents, step.meta, 0.2, k_up, v_up)
    slots = torch.stack((step.slots(0), step.slots(1)))
    got = ops.selected_attention(q, latents, slots, step.meta, 0.2, k_up, v_up)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_what_is_not_chosen_is_not_read() -> None:
    step, ops = IndexedStep.draw([(2, 40)]), select_ops(CPU)
    slots = step.slots(0)[torch.tensor([[3, 4, 30], [0, 1, 39]])]
    q, k_up, v_up = torch.randn(2, 3, 24), torch.randn(3, 16, 24), torch.randn(3, 12, 24)
    want = ops.selected_attention(q, step.pool, slots, step.meta, 0.2, k_up, v_up)
    others = torch.ones(step.pool.shape[0] * 4, dtype=torch.bool)
    others[slots.flatten()] = False
    step.pool.flatten(0, 3)[others] = torch.nan
    got = ops.selected_attention(q, step.pool, slots, step.meta, 0.2, k_up, v_up)
    assert torch.equal(got, want)


def test_long_contexts_are_taken_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_index, "MOST_NUMBERS", 1000)
    step = IndexedStep.draw([(30, 60), (1, 500)])
    got = select_ops(CPU).select_tokens(step.q, step.weights, step.pool, step.meta, 7)
    assert torch.equal(got, step.chosen(7))


def test_the_same_bits_alone_and_in_any_chunks() -> None:
    ops, step = select_ops(CPU, deterministic=True), IndexedStep.draw([(40, 300)], heads=3)
    q, k_up, v_up = torch.randn(40, 3, 24), torch.randn(3, 16, 24), torch.randn(3, 12, 24)
    whole = ops.select_tokens(step.q, step.weights, step.pool, step.meta, 8)
    attended = ops.selected_attention(q, step.pool, whole, step.meta, 0.2, k_up, v_up)
    for first, end in ((0, 1), (1, 18), (18, 40)):
        part = IndexedStep.draw([(end - first, 260 + end)], heads=3)
        meta = part.meta.over([end - first], [260 + end], step.meta.block_tables, part.meta.slots)
        rows = slice(first, end)
        slots = ops.select_tokens(step.q[rows], step.weights[rows], step.pool, meta, 8)
        assert torch.equal(slots, whole[rows])
        got = ops.selected_attention(q[rows], step.pool, slots, meta, 0.2, k_up, v_up)
        assert torch.equal(got, attended[rows])

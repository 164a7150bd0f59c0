"""The choice of tokens and attention to them, against the reference operations and the definition."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.torch import token_index as reference
from kernels.triton import token_index
from kernels.triton.token_index import invariant_selected_attention, select_tokens, selected_attention
from tests.kernels.indexed_steps import IndexedStep, Lens
from tests.kernels.latent_pools import KINDS, stored_pool

STEPS: dict[str, Lens] = {"decode": [(1, 40), (1, 9), (1, 70)], "prompts": [(7, 40), (1, 8), (20, 50)]}


@pytest.mark.parametrize("levels", [0, 2], ids=["any", "ties"])
@pytest.mark.parametrize("heads", [3, 20])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS)
def test_the_chosen_tokens(device: torch.device, lens: Lens, heads: int, levels: int) -> None:
    step = IndexedStep.draw(lens, heads=heads, levels=levels, device=device)
    got = select_tokens(step.q, step.weights, step.pool, step.meta, 8)
    assert torch.equal(got.cpu(), step.chosen(8))


def test_long_contexts_are_taken_in_runs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_index, "MOST_SCORES", 150)
    step = IndexedStep.draw([(9, 40), (1, 200), (3, 20)], device=device)
    got = select_tokens(step.q, step.weights, step.pool, step.meta, 7)
    assert torch.equal(got.cpu(), step.chosen(7))


@pytest.mark.parametrize("heads", [3, 20])
@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize("split", [0, 16])
def test_attention_to_chosen_tokens(device: torch.device, heads: int, count: int, split: int) -> None:
    """Also where a query's tokens are cut over several programs."""
    step = IndexedStep.draw([(2, 70), (1, 60)], device=device)
    slots = torch.stack([step.slots(seq)[torch.randperm(60)[:count]] for seq in (0, 0, 1)]).to(device)
    q = torch.randn(3, heads, 24, device=device)
    k_up, v_up = torch.randn(heads, 16, 24, device=device), torch.randn(heads, 12, 24, device=device)
    attend = partial(invariant_selected_attention, split_tokens=split) if split else selected_attention
    want = reference.selected_attention(q, step.pool, slots, step.meta, 0.1, k_up, v_up)
    got = attend(q, step.pool, slots, step.meta, 0.1, k_up, v_up)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_among_keys_of_8_bits_and_attention_to_it(device: torch.device, kind: str) -> None:
    step = IndexedStep.draw(STEPS["prompts"], device=device)
    pool = stored_pool(step.pool, kind, (24, 32), 4)
    got = select_tokens(step.q, step.weights, pool.stored, step.meta, 8)
    assert torch.equal(got.cpu(), replace(step, pool=pool.floats).chosen(8))
    q = torch.randn(len(step.q), 3, 24, device=device)
    k_up, v_up = torch.randn(3, 16, 24, device=device), torch.randn(3, 12, 24, device=device)
    want = reference.selected_attention(q, pool.floats, got, step.meta, 0.1, k_up, v_up)
    attended = selected_attention(q, pool.stored, got, step.meta, 0.1, k_up, v_up)
    torch.testing.assert_close(attended, want, atol=2e-4, rtol=1e-4)

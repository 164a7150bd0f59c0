"""Latents of 8 bits: stored as the hand-over stores them, read as the numbers that they mean."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.kv import KVLayout
from device.convert import convert
from kernels.kv_parts import ScaledLatents
from kernels.ops import AttentionMeta
from kernels.select import select_ops
from kernels.torch.stored_latents import write_latent
from tests.kernels.indexed_steps import IndexedStep
from tests.kernels.latent_pools import KINDS, stored_pool

CPU = torch.device("cpu")
RANK, ROTATED, INDEX, GROUP = 24, 8, 12, 4
KEPT = (RANK, RANK + ROTATED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_stored_as_it_is_when_it_is_handed_over(kind: str) -> None:
    torch.manual_seed(0)
    pool = torch.randn(5, 1, 1, 4, RANK + ROTATED + INDEX) * torch.logspace(-3, 3, 20).view(5, 1, 1, 4, 1)
    made = stored_pool(pool, kind, KEPT, GROUP).stored
    plain = KVLayout(
        num_layers=1, num_kv_heads=1, head_dim=pool.shape[4], block_size=4, dtype="float32", state="mla",
        group=GROUP, kept=KEPT,
    )  # fmt: skip
    data, scales = convert(
        plain, pool.numpy().view(np.uint8).reshape(-1), None, replace(plain, dtype=kind, scales="vector")
    )
    assert np.array_equal(made.data.view(torch.uint8).numpy().reshape(-1), data)
    assert scales is not None
    assert np.array_equal(made.scales.numpy().reshape(-1), scales)


@pytest.mark.parametrize(("kind", "most"), [("float8_e4m3fn", 1 / 16), ("int8", 1 / 254)])
def test_a_number_is_off_by_half_a_step_of_its_group_and_a_rotated_one_by_one_of_bfloat16(
    kind: str, most: float
) -> None:
    torch.manual_seed(1)
    pool = torch.randn(6, 1, 1, 4, RANK + ROTATED + INDEX) * torch.logspace(-2, 2, RANK + ROTATED + INDEX)
    error = (stored_pool(pool, kind, KEPT, GROUP).floats - pool).abs()
    rotated = slice(*KEPT)
    assert (error[..., rotated] <= pool[..., rotated].abs() / 256).all()
    for numbers in (slice(RANK), slice(RANK + ROTATED, None)):
        groups = pool[..., numbers].abs().unflatten(-1, (-1, GROUP)).amax(-1)
        assert (error[..., numbers] <= groups.repeat_interleave(GROUP, -1) * most * 1.001).all()


def test_a_layer_without_index_keys_leaves_their_room_as_it_is() -> None:
    kept = stored_pool(torch.zeros(2, 1, 1, 4, RANK + ROTATED + INDEX), "int8", KEPT, GROUP).stored
    before = kept.data.clone(), kept.scales.clone()
    slots = torch.tensor([5, 2])
    write_latent(torch.randn(2, RANK + ROTATED), kept, AttentionMeta.over([2], [2], (), slots))
    behind = RANK + 2 * ROTATED
    assert torch.equal(kept.data[..., behind:], before[0][..., behind:])
    assert torch.equal(kept.scales[..., RANK // GROUP :], before[1][..., RANK // GROUP :])
    changed = (kept.data != before[0]).flatten(0, 3).any(-1)
    assert changed.nonzero().flatten().tolist() == [2, 5]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_choice_are_those_of_the_numbers_that_are_meant(kind: str, deterministic: bool) -> None:
    ops = select_ops(CPU, deterministic=deterministic)
    step = IndexedStep.draw([(1, 40), (20, 50), (90, 90)], latent=RANK + ROTATED, size=INDEX)
    pool = stored_pool(step.pool, kind, KEPT, GROUP)
    k_up, v_up = torch.randn(5, 16, RANK), torch.randn(5, 10, RANK)
    q = torch.randn(len(step.q), 5, 16 + ROTATED)
    near = [ops.latent_attention(q, each, step.meta, 0.1, k_up, v_up) for each in (pool.stored, pool.floats)]
    torch.testing.assert_close(*near, atol=0, rtol=0)
    late = IndexedStep.draw([(1, 40), (20, 50), (60, 90)], latent=RANK + ROTATED, size=INDEX)
    pool = stored_pool(late.pool, kind, KEPT, GROUP)
    chosen = [
        ops.select_tokens(late.q, late.weights, each, late.meta, 8) for each in (pool.stored, pool.floats)
    ]
    assert torch.equal(*chosen)
    q = torch.randn(len(late.q), 5, 16 + ROTATED)
    far = [
        ops.selected_attention(q, each, chosen[0], late.meta, 0.1, k_up, v_up)
        for each in (pool.stored, pool.floats)
    ]
    torch.testing.assert_close(*far, atol=0, rtol=0)
    assert isinstance(pool.stored, ScaledLatents)

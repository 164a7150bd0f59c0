"""Triton's kernels over a part of a pool's heads."""

import pytest
import torch

from kernels.head_places import HeadPlaces
from kernels.triton.ops import triton_ops
from tests.kernels.kv_part_step import PLACES, check_attention, check_writing


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("places", PLACES)
def test_attention_is_that_of_a_pool_of_its_own(
    device: torch.device, places: HeadPlaces, window: int
) -> None:
    check_attention(triton_ops(device).paged_attention, places, window, device)


@pytest.mark.parametrize("places", PLACES)
def test_keys_and_values_are_written_to_the_part_alone(device: torch.device, places: HeadPlaces) -> None:
    norms = torch.rand(24).to(device), torch.rand(24).to(device), 1e-5
    write = triton_ops(device).rope_write_kv
    check_writing(lambda qkv, cos, sin, kv, meta: write(qkv, cos, sin, norms, kv, meta), places, device)

"""PyTorch's operations over a part of a pool's heads."""

import pytest
import torch

from kernels.cpu.invariant_ops import invariant_ops
from kernels.cpu.prepacked import prepacked_ops
from kernels.head_places import HeadPlaces
from kernels.torch.reference import reference_ops
from tests.kernels.kv_part_step import PLACES, check_attention, check_writing

CPU = torch.device("cpu")
OPS = {"reference": reference_ops(), "native": prepacked_ops("full"), "invariant": invariant_ops("full")}


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("places", PLACES)
def test_attention_is_that_of_a_pool_of_its_own(places: HeadPlaces, window: int, ops: str) -> None:
    attend = OPS[ops].paged_attention
    check_attention(attend, places, window, CPU)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("places", PLACES)
def test_keys_and_values_are_written_to_the_part_alone(places: HeadPlaces, ops: str) -> None:
    norms = torch.rand(24), torch.rand(24), 1e-5
    write = OPS[ops].rope_write_kv
    check_writing(lambda qkv, cos, sin, kv, meta: write(qkv, cos, sin, norms, kv, meta), places, CPU)

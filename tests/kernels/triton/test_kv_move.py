"""Blocks gathered, scattered and copied are the blocks that indexing says."""

import pytest
import torch

from kernels.triton.kv_move import copy_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_there_and_back(device: torch.device, dtype: torch.dtype) -> None:
    pool = (torch.randn(2, 9, 2, 3, 4, 8, device=device) * 50).to(dtype)
    ids, targets = torch.tensor([7, 0, 4], device=device), torch.tensor([1, 8, 2], device=device)
    packed = torch.zeros(2, 3, 2, 3, 4, 8, dtype=dtype, device=device)
    copy_blocks(pool, packed, ids, None)
    assert torch.equal(packed, pool[:, ids])
    there = torch.zeros_like(pool)
    copy_blocks(packed, there, None, targets)
    want = torch.zeros_like(pool)
    want[:, targets] = pool[:, ids]
    assert torch.equal(there, want)
    copy_blocks(pool, pool, ids, targets)
    assert torch.equal(pool[:, targets], packed)

"""Every kernel compiles for the GPUs that are served, within their registers and shared memory. Needs none of them."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from kernels.triton import attention_config, gemm, gemm_scaled
from kernels.triton.aot import Build, compile_launches, launches_given_to
from kernels.triton.attention_config import DECODE_ROWS, INVARIANT_ROWS, AttentionShape
from kernels.triton.launches import LAUNCHES, Launch

CASES = [
    pytest.param(launch, capability, id=f"{launch.name}-sm_{capability}")
    for launch in LAUNCHES
    for capability in launch.capabilities
]


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "capability"), CASES)
def test_fits(launch: Launch, capability: int) -> None:
    builds = compile_launches(capability, launch.run)
    assert builds
    for build in builds:
        assert build.registers > 8, "a kernel of which nothing is left has four"
    assert [build for build in builds if not build.fits] == []


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_tile_that_can_be_chosen_is_one_that_tensor_cores_take(capability: int) -> None:
    """At least 16 rows and columns, 32 of 8 bits along the sum, powers of two: the interpreter takes any."""
    meta, found = torch.device("meta"), list[int]()
    with launches_given_to(capability, lambda *_, **__: None):
        for (heads, kv_heads), size, dtype, quantised, rows in product(
            ((1, 1), (7, 1), (14, 2), (20, 1), (128, 1), (32, 8)),
            (8, 24, 64, 128, 256, 512, 576),
            (torch.float32, torch.bfloat16, torch.float16),
            (False, True),
            (DECODE_ROWS, INVARIANT_ROWS, 128),
        ):
            shape = AttentionShape(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=size,
                block_size=16,
                dtype=dtype,
                quantised=quantised,
            )
            tiles = attention_config.config_for(shape, rows, meta)
            assert tiles.heads <= tiles.block_m
            found += [tiles.block_m, tiles.block_n]
        for rows, size, dtype in product((1, 4096), (1, 24, 4096), (torch.float32, torch.bfloat16)):
            plain = gemm.config_for(rows, size, 1, dtype, meta)
            found += [plain.block_m, plain.block_n, plain.block_k]
        for rows in (1, 2, 17, 64, 65, 4096):
            scaled = gemm_scaled.config_for(rows, meta)
            found += [scaled.block_m, scaled.block_n, scaled.block_k // 2]
    assert {size for size in found if size < 16 or size & (size - 1)} == set()


def test_a_spill_and_too_much_shared_memory_do_not_fit() -> None:
    assert Build(
        name="good", capability=90, num_warps=4, registers=255, stack_bytes=0, shared_bytes=227 << 10
    ).fits
    assert not Build(
        name="spills", capability=90, num_warps=4, registers=255, stack_bytes=8, shared_bytes=0
    ).fits
    assert not Build(
        name="large", capability=80, num_warps=4, registers=64, stack_bytes=0, shared_bytes=200 << 10
    ).fits

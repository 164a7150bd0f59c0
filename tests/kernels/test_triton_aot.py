"""Every kernel compiles for the GPUs that are served, within their registers and shared memory. Needs none of them."""

from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from kernels.triton import attention_config, gemm, gemm_scaled
from kernels.triton.aot import Build, compile_launches, launches_given_to
from kernels.triton.attention_config import DECODE_ROWS, INVARIANT_ROWS, AttentionShape
from kernels.triton.launches import LAUNCHES, Launch
from tests.kernels.known_builds import known_builds
from tests.turns import number_of_today

KNOWN = known_builds()
OWN = """
import torch, triton
from triton import language as tl

@triton.jit
def more(x):
    return x + 1

@triton.jit
def kernel(out, SIZE: tl.constexpr):
    places = out + tl.arange(0, SIZE)
    tl.store(places, more(tl.load(places)))

def launch():
    kernel[(1,)](torch.empty(256, device="meta"), SIZE=64)
"""
"""A kernel, what it calls, and its launch."""
_EACH_DAY = 3
CASES = [
    pytest.param(launch, capability, id=f"{launch.name}-sm_{capability}")
    for launch in LAUNCHES
    for capability in launch.capabilities
]


def todays() -> list[Any]:
    first = number_of_today() * _EACH_DAY
    return [CASES[(first + at) % len(CASES)] for at in range(_EACH_DAY)]


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "capability"), CASES)
def test_fits(launch: Launch, capability: int) -> None:
    """What is known of the same source by the same compiler is not compiled again."""
    builds = [*compile_launches(capability, launch.run, KNOWN).values()]
    assert builds
    for build in builds:
        assert build.registers > 8, "a kernel of which nothing is left has four"
    assert [build for build in builds if not build.fits] == []


@pytest.mark.slow
@pytest.mark.parametrize(("launch", "capability"), todays())
def test_what_is_known_of_a_kernel_is_what_compiling_gives(launch: Launch, capability: int) -> None:
    builds = compile_launches(capability, launch.run)
    assert {digest: build for digest, build in builds.items() if KNOWN.get(digest, build) != build} == {}


def own_kernel(folder: Path, text: str) -> Any:
    """A module that this process has not compiled anything of."""
    folder.mkdir()
    (folder / "own_kernel.py").write_text(text)
    spec = spec_from_file_location("own_kernel", folder / "own_kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_known_is_not_compiled_and_what_has_changed_is(tmp_path: Path) -> None:
    ((digest, build),) = compile_launches(80, own_kernel(tmp_path / "first", OWN).launch).items()
    known = {digest: replace(build, registers=1)}
    assert compile_launches(80, own_kernel(tmp_path / "again", OWN).launch, known) == known
    changed = (OWN, 90), (OWN.replace("+ 1", "+ 2"), 80), (OWN.replace("SIZE=64", "SIZE=128"), 80)
    for number, (text, capability) in enumerate(changed):
        launch = own_kernel(tmp_path / str(number), text).launch
        for _ in ("compiled", "as this process has it"):
            ((other, made),) = compile_launches(capability, launch, known).items()
            assert other != digest
            assert made.registers > 1


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

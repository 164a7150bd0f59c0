"""Every kernel compiles for the GPUs that are served, within their registers and shared memory. Needs none of them."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from kernels.triton.aot import Build, compile_launches
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
        assert build.registers > 0
    assert [build for build in builds if not build.fits] == []


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

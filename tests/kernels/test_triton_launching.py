"""A known kernel is launched as Triton launches it. Needs no GPU: Triton compiles for an absent one, and what would be launched is
looked at."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.aot import absent_gpu
from kernels.triton.launching import Kernel, await_inputs

STREAM = 7


@triton.jit(do_not_specialize=["count"])
def _scaled_kernel(x, bias, out, stride, count, factor, flag, N: tl.constexpr, ADD: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, N)
    values = tl.load(x + at, at < count, 0.0) * factor
    if ADD:
        values += tl.load(bias + at)
    tl.store(out + at, values, flag)


@triton.jit(do_not_specialize=["row"])
def _copied_kernel(tiles, out, row, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tiles.load([row, 0]))


@triton.jit
def _waiting_kernel(x, out, N: tl.constexpr):
    await_inputs()
    tl.store(out + tl.arange(0, N), tl.load(x + tl.arange(0, N)))


Launched = tuple[object, ...]
"""Which machine code, and the arguments that it gets."""


class Launches:
    """What Triton, and a `Kernel`, would launch."""

    def __init__(self) -> None:
        self.kernel = Kernel(_scaled_kernel, lambda _: STREAM)
        self.copied = Kernel(_copied_kernel, lambda _: STREAM)
        self.seen: list[Launched] = []
        self.asked = 0

    def run(self, code: CompiledKernel, *arguments: Any) -> None:
        *grid, _stream, function, metadata, _, _, _ = arguments[:9]
        addresses = [place(each) for each in arguments[9:]]
        # Constants are in the machine code: what is passed in their places is nobody's.
        runtime = [
            each
            for each, (_, kind) in zip(addresses, code.src.signature.items(), strict=True)
            if kind != "constexpr"
        ]
        self.seen.append((code.hash, function, metadata, *grid, *runtime))


def place(argument: object) -> object:
    match argument:
        case torch.Tensor():
            return argument.data_ptr()
        case TensorDescriptor():
            return argument.base.data_ptr(), argument.shape, argument.strides, argument.block_shape
        case _:
            return argument


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    launches = Launches()
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda _: None)
    monkeypatch.setattr(
        CompiledKernel, "run", property(lambda code: lambda *arguments: launches.run(code, *arguments))
    )
    with absent_gpu(90):
        _scaled_kernel.device_caches.clear()
        _copied_kernel.device_caches.clear()
        yield launches


def both(launches: Launches, *arguments: Any, **constants: Any) -> tuple[Launched, Launched]:
    """Launch it by Triton alone, and by the kernel a second time."""
    constants = {"N": 16, "ADD": True, "num_warps": 1} | constants
    launches.kernel[3, 2](*arguments, **constants)
    launches.seen.clear()
    _scaled_kernel[3, 2](*arguments, **constants)
    launches.kernel[3, 2](*arguments, **constants)
    alone, known = launches.seen
    return alone, known


def floats(count: int = 64, start: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(count + start, dtype=dtype)[start:]


VARIANTS = {
    "aligned": {},
    "other stride": {"stride": 5},
    "stride of 1": {"stride": 1},
    "64-bit stride": {"stride": 1 << 33},
    "negative count": {"count": -4},
    "64-bit count": {"count": 1 << 40},
    "count of 1": {"count": 1},
    "other factor": {"factor": 0.5},
    "no flag": {"flag": False},
    "unaligned input": {"x": floats(start=1)},
    "unaligned output": {"out": floats(start=2)},
    "no bias": {"bias": None, "ADD": False},
    "half precision": {"x": floats(dtype=torch.float16)},
    "wider": {"N": 32},
    "more warps": {"num_warps": 2},
}


def arguments(variant: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = {
        "x": floats(),
        "bias": floats(),
        "out": floats(),
        "stride": 16,
        "count": 33,
        "factor": 2.0,
        "flag": True,
    }
    constants = {name: value for name, value in variant.items() if name not in given}
    return tuple((given | variant)[name] for name in given), constants


def test_a_known_kernel_gets_the_machine_code_and_arguments_that_triton_gives_it(launches: Launches) -> None:
    for variant in VARIANTS.values():
        values, constants = arguments(variant)
        alone, known = both(launches, *values, **constants)
        assert known == alone
    for name, variant in VARIANTS.items():  # all of them are known by now
        values, constants = arguments(variant)
        alone, known = both(launches, *values, **constants)
        assert known == alone, name


def test_a_descriptor_may_be_of_any_tensor(launches: Launches) -> None:
    """Machine code depends on its element type and its block, and not on the tensor's sizes."""
    hashes = set[object]()
    for dtype, rows, columns in (
        (torch.float32, 16, 32),
        (torch.int8, 16, 32),
        (torch.float32, 32, 32),
        (torch.float32, 16, 64),
    ):
        for size in (64, 192, 64):
            tiles = TensorDescriptor.from_tensor(torch.zeros(size, 2 * size, dtype=dtype), [rows, columns])
            values, constants = (tiles, torch.zeros(rows, columns, dtype=dtype), 3), {"M": rows, "N": columns}
            launches.seen.clear()
            _copied_kernel[2,](*values, **constants)
            launches.copied[2,](*values, **constants)
            alone, known = launches.seen
            assert known == alone
            hashes.add(alone[0])
    assert len(hashes) == 4


def test_a_known_kernel_is_launched_with_descriptors_without_asking_triton(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(size: int) -> object:
        tiles = TensorDescriptor.from_tensor(torch.zeros(size, size), [16, 32])
        launches.copied[1,](tiles, torch.zeros(16, 32), 3, M=16, N=32)
        return launches.seen[-1][-3][1]

    launch(32)
    monkeypatch.setattr(type(_copied_kernel), "run", None)
    assert [tuple(launch(size)) for size in (64, 128)] == [(64, 64), (128, 128)]


def test_triton_is_asked_once_for_what_it_compiles_for(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, _ = arguments({})
    launches.kernel[1,](*values, N=16, ADD=True)
    monkeypatch.setattr(type(_scaled_kernel), "run", None)
    for count, factor in ((34, 2.0), (1, 0.1), (64, 3.0)):
        others = (floats(), floats(), floats(), 16, count, factor, True)
        launches.kernel[1,](*others, N=16, ADD=True)
        assert launches.seen[-1][-3:-1] == (count, factor)


def test_launches_on_what_is_no_gpu_are_all_tritons(launches: Launches) -> None:
    nowhere = Kernel(_scaled_kernel)
    values, _ = arguments({})
    for _ in range(2):
        nowhere[1,](*values, N=16, ADD=True)
    assert isinstance(driver.active.get_current_device(), int)
    first, second = launches.seen
    assert first == second


@pytest.mark.parametrize(("capability", "may_overlap"), [(80, False), (90, True), (100, True)])
def test_a_kernel_is_launched_while_the_one_before_it_runs_from_hopper_on_and_waits(
    capability: int, may_overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[CompiledKernel]()
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda _: None)
    monkeypatch.setattr(CompiledKernel, "run", property(lambda code: lambda *_: compiled.append(code)))
    with absent_gpu(capability):
        for overlaps in (True, False):
            _waiting_kernel.device_caches.clear()
            Kernel(_waiting_kernel, lambda _: STREAM, overlaps=overlaps)[1,](floats(), floats(), N=16)
    assert [code.metadata.launch_pdl for code in compiled] == [may_overlap, False]
    for code in compiled:
        text = code.asm["ptx"]
        assert ("griddepcontrol.wait" in text) == may_overlap
        assert not may_overlap or text.index("griddepcontrol.wait") < text.index("ld.global")

"""Compiles for GPUs that are not there: launches on meta tensors are compiled for an architecture instead of run.

It compiles exactly what a launcher would launch for tensors of those shapes, strides and alignment, so that nothing is described
twice. The machine code's registers, stack and shared memory are read with the cuobjdump that triton brings.

Compiling takes seconds for each kernel. A digest of all that goes into it says whether the outcome is known already."""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""What one program may have, by compute capability."""

_DIGESTS: dict[int, str] = {}
"""By the identity of a compiled kernel, which lives as long as the process."""
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One kernel's machine code for one architecture."""

    name: str
    capability: int
    num_warps: int
    registers: int
    """Registers of a thread."""
    stack_bytes: int
    """A thread's bytes that did not fit its registers."""
    shared_bytes: int
    """Shared memory of a program."""

    @property
    def fits(self) -> bool:
        return self.stack_bytes == 0 and self.shared_bytes <= MAX_SHARED_BYTES[self.capability]


class _AbsentGpu:
    """Answers what the compiler asks a driver: for which GPU, and where the launch would go."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def compile_launches(
    capability: int, launch: Callable[[], object], known: Mapping[str, Build] | None = None
) -> dict[str, Build]:
    """Run `launch`, whose tensors are all on the meta device, and compile every kernel it launches. Returns the builds by the
    digests of what they were made from. One whose digest is `known` is not made again.

    Not for processes with TRITON_INTERPRET, and not thread-safe: triton's driver is replaced meanwhile."""
    builds, run = dict[str, Build](), JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        digests: list[str] = []

        def is_known(*, key: str, fn: Any, **_: Any) -> bool:
            digests.append(_digest(fn.jit_function.cache_key, key, capability))
            return digests[-1] in (known or {})

        with knobs.runtime.scope():
            knobs.runtime.jit_cache_hook = is_known
            made = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        if made is None:
            builds[digests[0]] = (known or {})[digests[0]]
        else:  # this process may have made it before, and triton has kept it
            digest = _DIGESTS.setdefault(id(made), digests[0]) if digests else _DIGESTS[id(made)]
            builds[digest] = _build(made, capability)

    with launches_given_to(capability, compile_only):
        launch()
    return builds


def _digest(source: str, arguments: str, capability: int) -> str:
    """Return it of a kernel's source with all that it calls, of what its arguments and options are, and of the compiler."""
    parts = (source, arguments, str(capability), triton.__version__)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _build(kernel: Any, capability: int) -> Build:
    registers, stack_bytes = _resource_usage(kernel.asm["cubin"])
    return Build(
        name=kernel.metadata.name,
        capability=capability,
        num_warps=kernel.metadata.num_warps,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=kernel.metadata.shared,
    )


@contextmanager
def launches_given_to(capability: int, take: Callable[..., object]) -> Iterator[None]:
    """Meanwhile `take` is called in place of `JITFunction.run`, for an absent GPU."""
    run = JITFunction.run
    JITFunction.run = take
    try:
        with absent_gpu(capability):
            yield
    finally:
        JITFunction.run = run


@contextmanager
def absent_gpu(capability: int) -> Iterator[None]:
    """Meanwhile Triton compiles for a GPU that is not there."""
    active = driver._active
    driver.set_active(_AbsentGpu(capability))
    try:
        yield
    finally:
        driver._active = active


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])

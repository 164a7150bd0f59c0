"""CUDA C++ of `device/`, compiled as C++ and run on the host, one thread after the other."""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from device.many_copies import Launch
from kernels.cpu.build import find_compiler

_CUDA = """
#include <math.h>
#define __global__
#define __device__
#define __align__(bytes) __attribute__((aligned(bytes)))
static struct { unsigned x; } threadIdx, blockIdx, blockDim, gridDim;
SOURCE
extern "C" void launch(unsigned programs, unsigned threads, const unsigned long long *list, unsigned long long count) {
  gridDim.x = programs;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < programs; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) NAME(list, count);
}
"""


@functools.cache
def load_launch(source: str, name: str) -> Launch:
    with tempfile.TemporaryDirectory(prefix="baton-test-") as folder:
        library = Path(folder) / "copies.so"
        command = [*find_compiler(), "-x", "c++", "-O1", "-shared", "-fPIC", "-o", str(library), "-"]
        subprocess.run(
            command, input=_CUDA.replace("SOURCE", source).replace("NAME", name), text=True, check=True
        )
        call = ctypes.CDLL(str(library)).launch
    call.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint64]

    def launch(programs: int, threads: int, arguments: Sequence[np.generic], stream: int) -> None:
        call(programs, threads, *(int(argument) for argument in arguments))

    return launch


def no_kernel(source: str, name: str) -> Launch:
    raise RuntimeError("NVRTC is missing")

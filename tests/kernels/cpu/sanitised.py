"""Every function of the native library over odd sizes, without torch: for a library that AddressSanitizer and UBSan watch.

    python sanitised.py LIBRARY

Each buffer is an allocation of just its size, so that one byte too far is seen. Products are compared with numpy's."""

import sys
import threading
from ctypes import CDLL, c_int, c_int64, c_void_p

import numpy as np

LIBRARY = CDLL(sys.argv[1])
LIBRARY.baton_packed_bytes.restype = c_int64
SHAPES = [(1, 1, 8), (3, 7, 33), (13, 33, 77), (25, 64, 130), (97, 40, 64)]
RNG = np.random.default_rng(0)


def at(array: np.ndarray | None) -> c_void_p:
    return c_void_p(None if array is None else array.ctypes.data)


def room(layout: int, matrix: np.ndarray, group: int, has_zeros: bool) -> np.ndarray:
    outputs, inputs = matrix.shape
    shape = c_int(layout), c_int64(outputs), c_int64(inputs), c_int64(group), c_int(has_zeros)
    return np.empty(LIBRARY.baton_packed_bytes(*shape), np.uint8)


def product(
    isa: int, layout: int, group: int, has_zeros: bool, panels: np.ndarray, x: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    out = np.empty((len(x), len(bias)), np.float32)
    shape = c_int(layout), c_int64(len(bias)), c_int64(x.shape[1]), c_int64(group), c_int(has_zeros)
    LIBRARY.baton_linear(c_int(isa), *shape, at(panels), at(x), c_int64(len(x)), at(bias), at(out), c_int(2))
    return out


def packed(layout: int, matrix: np.ndarray, group: int) -> np.ndarray:
    panels = room(layout, matrix, group, False)
    shape = c_int(layout), c_int64(matrix.shape[0]), c_int64(matrix.shape[1]), c_int64(group)
    LIBRARY.baton_pack_floats(*shape, at(matrix), at(panels), c_int(2))
    return panels


def packed_int8(matrix: np.ndarray) -> np.ndarray:
    values = np.rint(matrix * 40).clip(-128, 127).astype(np.int8)
    scales, panels = np.full(len(matrix), 1 / 40, np.float32), room(3, matrix, 1, False)
    shape = c_int64(matrix.shape[0]), c_int64(matrix.shape[1])
    LIBRARY.baton_pack_int8(*shape, at(values), at(scales), at(panels), c_int(2))
    return panels


def packed_int4(matrix: np.ndarray, group: int) -> np.ndarray:
    groups = -(-matrix.shape[1] // group)
    values = (np.rint(matrix * 3) + 7).clip(0, 15).astype(np.uint8)
    scales = np.full((len(matrix), groups), 1 / 3, np.float16)
    zeros, panels = np.full((len(matrix), groups), 7, np.uint8), room(4, matrix, group, True)
    shape = c_int64(matrix.shape[0]), c_int64(matrix.shape[1]), c_int64(group)
    LIBRARY.baton_pack_int4(*shape, at(values), at(scales), at(zeros), at(panels), c_int(2))
    return panels


def check(isa: int, count: int, outputs: int, inputs: int) -> None:
    matrix, x, bias = (
        RNG.standard_normal(shape).astype(np.float32)
        for shape in ((outputs, inputs), (count, inputs), (outputs,))
    )
    wanted = x.astype(np.float64) @ matrix.T + bias
    made = [(layout, 32, False, packed(layout, matrix, 32)) for layout in range(5)]
    made += [(3, 1, False, packed_int8(matrix)), (4, 8, True, packed_int4(matrix, 8))]
    for (layout, group, has_zeros, panels), most in zip(
        made, (1e-5, 0.01, 0.01, 0.05, 0.3, 0.1, 0.3), strict=True
    ):
        got = product(isa, layout, group, has_zeros, panels, x, bias)
        off = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert off < most, (isa, layout, count, outputs, inputs, off)


def main() -> None:
    for isa in range(2):
        if LIBRARY.baton_has(c_int(isa)):
            for shape in SHAPES:
                check(isa, *shape)
            memory = np.ones(300_001, np.uint8)
            LIBRARY.baton_read(c_int(isa), at(memory), c_int64(memory.size), c_int(2))
    callers = [threading.Thread(target=check, args=(0, 13, 133, 77)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    print("clean")  # noqa: T201


main()

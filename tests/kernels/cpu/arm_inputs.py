"""Inputs of native kernels in memory that two processes share."""

from typing import Any

import numpy as np

from kernels.cpu.layer_structs import GivenLayer, GivenMatrix
from tests.kernels.cpu.other_machine import SharedMemory

F32, BF16, F16, INT8, INT4, STEPS4 = range(6)
FROM_FLOATS = (F32, BF16, F16, INT8, STEPS4)
SCALES = (F32, F32, F32, F32, F16, BF16)
"""Formats of the scales of each layout."""


def at(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def random(memory: SharedMemory, *shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return memory.put(rng.standard_normal(shape).astype(np.float32))


def bits(matrix: np.ndarray) -> np.ndarray:
    """bfloat16, cut off."""
    return (matrix.view(np.uint32) >> 16).astype(np.uint16)


def packed(
    memory: SharedMemory, lib: Any, layout: int, matrix: np.ndarray, group: int, kind: int = F32
) -> np.ndarray:
    shape = layout, *matrix.shape, group
    panels = memory.room(lib.baton_packed_bytes(*shape, 0, SCALES[layout]), np.uint8)
    lib.baton_pack_floats(*shape, kind, at(matrix), at(panels), 1)
    return panels


def group_of(layout: int, inputs: int) -> int:
    return -(-inputs // 4) * 4 if layout == INT8 else 32


def whole_numbers(memory: SharedMemory, layout: int, shape: tuple[int, int], group: int, width: int, kind: int) -> tuple[Any, ...]:  # fmt: skip
    """What a checkpoint has: values, scales, and zero points of `width` bytes."""
    rng, groups = np.random.default_rng(group), (shape[0], -(-shape[1] // group))
    least, most = (-128, 128) if layout == INT8 else (0, 16)
    values = rng.integers(least, most, shape).astype(np.int8 if layout == INT8 else np.uint8)
    scales = rng.standard_normal(groups).astype(np.float32)
    made = bits(scales) if kind == BF16 else scales.astype(np.float16 if kind == F16 else np.float32)
    zeros = (rng.random(groups) * 15).astype(np.float16 if width == 2 else np.uint8) if width else None
    return memory.put(values), memory.put(made), None if zeros is None else memory.put(zeros)


def stored(memory: SharedMemory, number: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """A pool of float32, bfloat16, or int8 with scales."""
    if number < 2:
        return memory.put(bits(numbers) if number else numbers), None
    scales = np.abs(numbers).max(-1) / 127
    return memory.put(np.rint(numbers / scales[..., None]).astype(np.int8)), memory.put(scales)


HIDDEN, INNER, HEADS, KV_HEADS, SIZE, BLOCK = 37, 21, 4, 2, 16, 3
MATRICES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
    "output": (HIDDEN, HEADS * SIZE),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}


def layer(memory: SharedMemory, lib: Any, isa: int, layout: int, gate: int) -> GivenLayer:
    matrices = {}
    for name, (outputs, inputs) in MATRICES.items():
        matrix = memory.put(random(memory, outputs, inputs) / np.float32(6))
        panels = packed(memory, lib, layout, matrix, 32)
        matrices[name] = GivenMatrix(
            isa=isa, format=layout, outputs=outputs, inputs=inputs, group=32, scales=SCALES[layout], panels=at(panels),
            bias=at(random(memory, outputs)),
        )  # fmt: skip
    norm, head = at(random(memory, HIDDEN)), at(random(memory, SIZE))
    return GivenLayer(
        **matrices, attention_norm=norm, q_norm=head, k_norm=head, sinks=at(random(memory, HEADS)), mlp_norm=norm,
        behind_mlp=norm, window=7, gate=gate, score_scale=0.3, soft_cap=5.0, eps=1e-5, head_eps=1e-6, residual_scale=0.5,
    )  # fmt: skip

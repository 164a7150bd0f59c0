"""What the launchers must know of where they run: the interpreter or a GPU, and the tiles that a shape asks for."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.head_places import HeadPlaces
from kernels.kv_parts import KVPart
from kernels.ops import KVLayer

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET=1 was set when triton was imported, so that kernels run in numpy, on host tensors."""

_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def cdiv(number: int, by: int) -> int:
    """As `triton.cdiv`, which takes longer than a launch."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """As `triton.next_power_of_2`, which takes longer than a launch."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return what tiles are converted to before a dot product: `dtype`, but float32 in the interpreter, whose bfloat16 arithmetic
    is that of its 16-bit integers."""
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else _TL_DTYPES[dtype]


def capability(device: torch.device) -> int:
    """Return ten times the compute capability of `device`, or of what is compiled for ahead of time."""
    if device.type == "cuda":
        return 10 * _properties(device).major + _properties(device).minor
    return 90 if INTERPRETED else int(triton.runtime.driver.active.get_current_target().arch)


def num_programs(device: torch.device, per_processor: int = 1) -> int:
    """Return the number of programs of a persistent grid: `per_processor` for each multiprocessor."""
    if device.type != "cuda":
        return (2 if INTERPRETED else 132) * per_processor
    return _properties(device).multi_processor_count * per_processor


@cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def warps_for(num_elements: int) -> int:
    """Return the warps of a program that keeps `num_elements` in registers at once: 16 to 32 of them a thread."""
    return min(16, max(1, num_elements // 1024))


def parts_of(kv_layer: KVLayer) -> tuple[Tensor, Tensor | None]:
    """Return its vectors, and their scales if it has any."""
    if isinstance(kv_layer, Tensor):
        return kv_layer, None
    return kv_layer.data, None if isinstance(kv_layer, KVPart) else kv_layer.scales


def places_in(kv_layer: KVLayer) -> HeadPlaces:
    """Return which of a pool's heads a layer has."""
    return kv_layer.places if isinstance(kv_layer, KVPart) else HeadPlaces(0, 1, 1)

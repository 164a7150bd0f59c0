"""Products with matrices in the layouts in which a CPU multiplies them fastest; a matrix is laid out once, as a model is loaded.

- float32 and bfloat16: oneDNN's blocks. A processor without products of bfloat16 gets FBGEMM's float16 instead.
- float16: FBGEMM's panels, made float32 in registers and added up in float32. On AMD's processors that takes twice as long as a
  product of float32 from some fifty rows on: there the matrix is kept beside its panels, and made float32 piece by piece.
- int8: FBGEMM's panels with one scale for the matrix; inputs are rounded to 8 bits as they come.

Otherwise the matrix itself is not kept. PyTorch calls FBGEMM's functions deprecated: our own kernels are to replace them."""

import warnings
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from kernels.ops import Ops
from kernels.packed import LinearWeight, Prepacked, Weight, as_float
from kernels.rounding import Activations, as_floats
from kernels.torch import reference

WeightFormat = Literal["full", "float16", "int8"]
"""`full` is what the model computes in."""
_LARGEST_FLOAT16: Final = 65504.0
_LEAST_PACKED: Final = 1 << 18
"""The numbers of a matrix from which on it is packed. Products with smaller ones take less time than a call of oneDNN's
function."""
_MANY_ROWS: Final = 48
"""The rows of inputs with which, on an AMD EPYC with AVX-512, panels and pieces of float32 take equally long."""
_PIECE: Final = 1024
"""The rows of a matrix that are made float32 at once: a few MB, which stay in a core's cache."""


def prepacked_ops(weights: WeightFormat) -> Ops:
    """Return the reference's operations over matrices that are kept as `weights` says. For one model on one thread."""
    return replace(reference.reference_ops(), linear=linear, pack=partial(pack, weights))


def linear(x: Activations, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """`Ops.linear`."""
    if not isinstance(weight, Prepacked):
        return reference.linear(x, weight, bias)
    rows = as_floats(x)
    return weight.product(rows, bias) if len(rows) else rows.new_empty(0, weight.shape[0])


def pack(weights: WeightFormat, weight: Weight, dtype: torch.dtype) -> LinearWeight:
    """`Ops.pack`. A matrix that float16 cannot hold, or for which no layout exists, stays as wide as it is."""
    matrix = as_float(weight, dtype)
    match weights:
        case "int8":
            return _int8(matrix.float())
        case "float16" if _fits_float16(matrix):
            return _float16(matrix.float())
        case _ if dtype == torch.bfloat16 and not has_bfloat16() and _fits_float16(matrix):
            return _float16(matrix.float())
        case _:
            return _full(matrix)


def bytes_per_number(weights: WeightFormat, dtype: torch.dtype) -> int:
    """Return the bytes that `pack` keeps of each number of a large matrix."""
    match weights:
        case "int8":
            return 1
        case "float16":
            return 4 if _panels_are_slow() else 2
        case _ if dtype == torch.bfloat16 and not has_bfloat16():
            return 4 if _panels_are_slow() else 2
        case _:
            return dtype.itemsize


@cache
def has_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16. Without it such a product is 8 times as slow as one of float32."""
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())  # pyright: ignore[reportPrivateUsage]


@cache
def _panels_are_slow() -> bool:
    """Return whether panels are slow with many rows, beside a product of float32. The processor's maker tells it, not a timing,
    so that equal machines give equal sums."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _fits_float16(matrix: Tensor) -> bool:
    return bool(matrix.abs().amax() <= _LARGEST_FLOAT16)


def _full(matrix: Tensor) -> LinearWeight:
    if matrix.numel() < _LEAST_PACKED or not torch.backends.mkldnn.is_available():
        return matrix
    packed = torch.ops.mkldnn._reorder_linear_weight(matrix, 1)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")

    return Prepacked((matrix.shape[0], matrix.shape[1]), product)


def _float16(matrix: Tensor) -> Prepacked:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(matrix)
        no_bias = torch.zeros(matrix.shape[0])
        torch.fbgemm_linear_fp16_weight(torch.zeros(1, matrix.shape[1]), packed, no_bias)

    kept = matrix.half() if _panels_are_slow() else None

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        own = no_bias if bias is None else bias.float()
        rows = x.float().contiguous()
        if kept is not None and len(rows) >= _MANY_ROWS:
            return _in_pieces(rows, kept).add_(own).to(x.dtype)
        return torch.fbgemm_linear_fp16_weight(rows, packed, own).to(x.dtype)

    return Prepacked((matrix.shape[0], matrix.shape[1]), product)


def _in_pieces(x: Tensor, matrix: Tensor) -> Tensor:
    out = x.new_empty(len(x), len(matrix))
    for at in range(0, len(matrix), _PIECE):
        out[:, at : at + _PIECE] = x @ matrix[at : at + _PIECE].float().T
    return out


def _int8(matrix: Tensor) -> Prepacked:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values, offsets, scale, zero_point = torch.fbgemm_linear_quantize_weight(matrix)
        packed = torch.fbgemm_pack_quantized_matrix(values)
        no_bias = torch.zeros(matrix.shape[0])
        # The product reads the panels; of the matrix itself it asks the shape alone, which needs no memory.
        shape = torch.empty(1, 1, dtype=values.dtype).expand(values.shape)
        some = torch.zeros(1, matrix.shape[1])
        torch.fbgemm_linear_int8_weight(some, shape, packed, offsets, scale, zero_point, no_bias)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        own = no_bias if bias is None else bias.float()
        rows = x.float().contiguous()
        return torch.fbgemm_linear_int8_weight(rows, shape, packed, offsets, scale, zero_point, own).to(
            x.dtype
        )

    return Prepacked((matrix.shape[0], matrix.shape[1]), product)

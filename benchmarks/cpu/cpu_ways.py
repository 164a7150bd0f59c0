"""How CPUs multiplied before there were native kernels: what `benchmarks.cpu.cpu_weights` measures them against."""

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from kernels.cpu.prepacked import in_blocks, prepacked_ops
from kernels.ops import Ops
from kernels.packed import LinearWeight, Prepacked, Weight, as_float

_MANY_ROWS, _PIECE = 48, 1024


def onednn() -> Ops:
    """float32 in oneDNN's blocks."""
    return replace(prepacked_ops("full"), pack=lambda weight, dtype: in_blocks(as_float(weight, dtype)))


def fbgemm_half() -> Ops:
    """float16 in FBGEMM's panels; many rows go by pieces made float32, as on AMD's processors."""
    return replace(prepacked_ops("half"), pack=_pack_half)


def fbgemm_int8() -> Ops:
    """8 bits in FBGEMM's panels, with one scale for a matrix."""
    return replace(prepacked_ops("int8"), pack=_pack_int8)


def _pack_half(weight: Weight, dtype: torch.dtype) -> LinearWeight:
    matrix = as_float(weight, dtype).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.fbgemm_pack_gemm_matrix_fp16(matrix)
        no_bias = torch.zeros(matrix.shape[0])
        torch.fbgemm_linear_fp16_weight(torch.zeros(1, matrix.shape[1]), packed, no_bias)
    kept = matrix.half()

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        own = no_bias if bias is None else bias
        if len(x) < _MANY_ROWS:
            return torch.fbgemm_linear_fp16_weight(x.contiguous(), packed, own)
        out = x.new_empty(len(x), len(kept))
        for at in range(0, len(kept), _PIECE):
            out[:, at : at + _PIECE] = x @ kept[at : at + _PIECE].float().T
        return out.add_(own)

    return Prepacked((matrix.shape[0], matrix.shape[1]), product)


def _pack_int8(weight: Weight, dtype: torch.dtype) -> LinearWeight:
    matrix = as_float(weight, dtype).float()
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
        own = no_bias if bias is None else bias
        return torch.fbgemm_linear_int8_weight(x.contiguous(), shape, packed, offsets, scale, zero_point, own)

    return Prepacked((matrix.shape[0], matrix.shape[1]), product)

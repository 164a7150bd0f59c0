"""Products with matrices in the layouts in which a CPU multiplies them fastest; a matrix is laid out once, as a model is loaded.

Native kernels have panels of their own (`kernels/cpu/linear.py`): of float32, of 16 bits and of fewer. Without them there are
oneDNN's blocks. The matrix itself is not kept."""

from dataclasses import replace
from functools import cache, partial
from typing import Final, Literal

import torch
from torch import Tensor

from kernels.cpu.attention import native_first
from kernels.cpu.dense_layers import fuse
from kernels.cpu.elementwise import with_native_rows
from kernels.cpu.feed_forward import native_feed_forward
from kernels.cpu.library import Isa, fastest_of_bfloat16, native
from kernels.cpu.linear import TASK_ROWS, InPanels, Layout, Panels, packed
from kernels.cpu.pages import result
from kernels.cpu.sampling import with_native_sampling
from kernels.cpu.stored import KEPT, stored_experts, stored_panels
from kernels.ops import ExpertWeights, FeedForward, GatedBlock, Ops
from kernels.packed import Kind, LinearWeight, LookUp, Prepacked, Weight, as_float
from kernels.packing import NVFP4_GROUP
from kernels.rounding import Activations, as_floats
from kernels.torch import reference

WeightFormat = Literal["full", "half", "int8", "int4", "fp8", "nvfp4"]
"""`full` is what the model computes in; `half` has 16 bits, but what a checkpoint stores in fewer stays as it is. All but `full`
need native kernels. Of `fp8` and `nvfp4` matrices come rounded, and are kept as a checkpoint's are. GPUs' kernels keep what
they are given: there all but `full` come rounded."""
_AS_STORED: Final = ("half", "fp8", "nvfp4")
INT4_GROUP: Final = 256
"""Inputs that share a scale of 16 bits; each 32 of them have a step of 8."""
_LEAST_PACKED: Final = 1 << 18
"""The numbers of a matrix from which on it is packed. Products with smaller ones take less time than the call of a packed one."""
NARROW: Final = {torch.bfloat16: Layout.BFLOAT16, torch.float16: Layout.FLOAT16}


def prepacked_ops(weights: WeightFormat) -> Ops:
    """Return the reference's operations over matrices that are kept as `weights` says. For one model on one thread."""
    plain = with_native_rows(with_native_sampling(reference.reference_ops()))
    of_bfloat16 = fastest_of_bfloat16()
    return replace(
        plain,
        paged_attention=native_first(plain.paged_attention),
        linear=linear,
        feed_forward=feed_forward,
        pack=partial(pack, weights, of_bfloat16=of_bfloat16),
        look_up=partial(look_up, weights),
        pack_experts=pack_experts,
        fuse=fuse,
        keeps=kept(weights),
    )


def kept(weights: WeightFormat) -> frozenset[Kind]:
    """`Ops.keeps`. Numbers of 16 bits become floats where they are packed, one matrix at a time."""
    if native() is None:
        return frozenset()
    return KEPT if weights in _AS_STORED else frozenset(("half",))


def linear(x: Activations, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """`Ops.linear`."""
    if not isinstance(weight, Prepacked):
        return reference.linear(x, weight, bias)
    rows = as_floats(x)
    return weight.product(rows, bias) if rows.size(0) else rows.new_empty(0, weight.shape[0])


def feed_forward(block: GatedBlock, in_order: FeedForward) -> FeedForward:
    """`Ops.feed_forward`: one native call where its matrices are in panels, else piece by piece."""
    by_pieces = partial(in_pieces, in_order)
    return native_feed_forward(block, by_pieces) or by_pieces


def in_pieces(operation: FeedForward, x: Activations) -> Tensor:
    """Return operation(x), of as many rows as a product takes at a time, so that it reads matrices no more often."""
    if not isinstance(x, Tensor) or len(x) < 2 * TASK_ROWS:
        return operation(x)
    first, *others = x.split(TASK_ROWS)
    piece = operation(first)
    shape = len(x), *piece.shape[1:]
    out = result(*shape) if piece.dtype == torch.float32 else piece.new_empty(shape)
    out[:TASK_ROWS], end = piece, TASK_ROWS
    for part in others:
        out[end : end + len(part)] = operation(part)
        end += len(part)
    return out


def pack(
    weights: WeightFormat, weight: Weight, dtype: torch.dtype, of_bfloat16: Isa | None = None
) -> LinearWeight:
    """`Ops.pack`. A matrix that 16 bits cannot hold stays as wide as it is. `of_bfloat16`: the instruction set that multiplies
    with matrices of bfloat16; None: one that rounds no row to it."""
    if weights in _AS_STORED and (stored := stored_panels(weight)) is not None:
        return in_panels(stored)
    if weights in _AS_STORED and isinstance(weight, Tensor) and weight.dtype in NARROW:
        return _narrow(weight, NARROW[weight.dtype], of_bfloat16)
    match weights:
        case "int8":
            return in_panels(packed(_to_round(weight, dtype), Layout.INT8))
        case "int4":
            return in_panels(packed(_to_round(weight, dtype), Layout.STEPS4, INT4_GROUP))
        case "half" | "fp8" | "nvfp4":
            matrix = as_float(weight, dtype)
            return _narrow(matrix, _narrowest(matrix), of_bfloat16)
        case "full":
            return _full(as_float(weight, dtype), of_bfloat16)


def _narrow(matrix: Tensor, layout: Layout, of_bfloat16: Isa | None) -> Prepacked:
    return in_panels(packed(matrix, layout, isa=of_bfloat16 if layout == Layout.BFLOAT16 else None))


def _to_round(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the numbers that are rounded to fewer bits: those of 16 bits as they are, without as much memory again."""
    if isinstance(weight, Tensor) and weight.dtype in NARROW and dtype == torch.float32:
        return weight
    return as_float(weight, dtype)


def look_up(weights: WeightFormat, weight: Weight, dtype: torch.dtype, head: LinearWeight | None) -> LookUp:
    """`Ops.look_up`: the head's own matrix, where it can be read back. 4 bits are too few for an embedding, which has 8 then."""
    if isinstance(head, Prepacked) and head.rows is not None:
        return head.rows
    if weights in ("int8", "int4"):
        return packed(_to_round(weight, dtype), Layout.INT8).rows
    if weights in _AS_STORED and (stored := stored_panels(weight)) is not None and stored.has_rows:
        return stored.rows
    return reference.look_up(weight, dtype, head)


def reads_back(weights: WeightFormat) -> bool:
    """Return whether what `pack` makes of a large matrix of floats has rows that `look_up` reads."""
    return native() is not None and weights not in ("int4", "nvfp4")


def in_panels(panels: Panels) -> Prepacked:
    return InPanels(panels.shape, panels.product, panels.rows if panels.has_rows else None, panels=panels)


def pack_experts(held: ExpertWeights) -> ExpertWeights:
    """`Ops.pack_experts`."""
    return replace(held, gate_up=stored_experts(held.gate_up), down=stored_experts(held.down))


def bytes_per_number(weights: WeightFormat, dtype: torch.dtype) -> float:
    """Return the bytes that `pack` keeps of each number of a large matrix."""
    match weights:
        case "int8":
            return 1
        case "int4":
            return 0.5 + 1 / 32 + 2 / INT4_GROUP
        case "half":
            return 2
        case "fp8":
            return dtype.itemsize
        case "nvfp4":
            return 1 + 4 / NVFP4_GROUP
        case "full":
            is_kept = native() is not None or (dtype == torch.bfloat16 and has_bfloat16())
            return dtype.itemsize if is_kept else 4


@cache
def has_bfloat16() -> bool:
    """Return whether oneDNN multiplies bfloat16. Without it such a product is 8 times as slow as one of float32."""
    has_amx = torch.cpu._is_amx_tile_supported()  # pyright: ignore[reportPrivateUsage]
    return bool(has_amx or torch.cpu._is_avx512_bf16_supported())  # pyright: ignore[reportPrivateUsage]


def _narrowest(matrix: Tensor) -> Layout:
    """Return the layout that loses nothing: some matrices of 16 bits have been made float32 before, such as those of which a part
    has the other kind of 16 bits."""
    for dtype, layout in NARROW.items():
        if torch.equal(matrix.to(dtype).to(matrix.dtype), matrix):
            return layout
    return Layout.FLOAT32


def _full(matrix: Tensor, of_bfloat16: Isa | None) -> LinearWeight:
    if matrix.numel() < _LEAST_PACKED:
        return matrix
    if native() is not None:
        return _narrow(matrix, NARROW.get(matrix.dtype, Layout.FLOAT32), of_bfloat16)
    return in_blocks(matrix if matrix.dtype == torch.bfloat16 and has_bfloat16() else matrix.float())


def in_blocks(matrix: Tensor) -> LinearWeight:
    """Return the matrix in the blocks of oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return matrix
    blocks = torch.ops.mkldnn._reorder_linear_weight(matrix, 1)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        rows, own = x.to(matrix.dtype).contiguous(), None if bias is None else bias.to(matrix.dtype)
        return torch.ops.mkldnn._linear_pointwise(rows, blocks, own, "none", [], "").to(x.dtype)

    return Prepacked((matrix.shape[0], matrix.shape[1]), product)

"""Sampling by native kernels (`src/row_sampling.h`). A row's token does not depend on other rows."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.ops import Ops
from kernels.sampling import Masks, SampleShapes

_NO_ROWS, _NO_BITS = torch.empty(0, dtype=torch.int64), torch.empty((0, 0), dtype=torch.int32)


def with_native_sampling(ops: Ops) -> Ops:
    """Return `ops` that sample so, where there are native kernels."""
    return ops if library.native() is None else replace(ops, sample=sample)


def sample(
    logits: Tensor, asked: SampleShapes, masks: Masks | None = None, isa: library.Isa | None = None
) -> Tensor:
    """`Ops.sample`. `isa` None: the fastest."""
    logits = logits.float() if logits.dtype.itemsize == 2 else logits
    rows, count = _checked(logits)
    if asked.columns.shape != (5, rows) or asked.columns.dtype != torch.float64:
        raise ValueError(
            f"native samples take (5, {rows}) numbers of float64, not {tuple(asked.columns.shape)} of {asked.columns.dtype}"
        )
    columns = asked.columns.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64)
    masked, bits = _checked_masks(masks, logits) if masks is not None else (_NO_ROWS, _NO_BITS)
    library.loaded().baton_sample(
        library.fastest_exact() if isa is None else isa, logits.data_ptr(), rows, count, columns.data_ptr(),
        masked.data_ptr(), bits.data_ptr(), bits.size(1), masked.size(0), tokens.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return tokens


def _checked(logits: Tensor) -> tuple[int, int]:
    """Return the numbers of rows and of tokens. Pointers know no types and no bounds."""
    if logits.dim() != 2 or not logits.size(1) or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(
            f"native samples take contiguous logits (N, V) of float32, not {tuple(logits.shape)} of {logits.dtype}"
        )
    return logits.size(0), logits.size(1)


def _checked_masks(masks: Masks, logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, bits = masks.rows, masks.bits
    _check(
        rows.dtype == torch.int64 and rows.dim() == 1 and bool(((rows >= 0) & (rows < len(logits))).all()),
        f"rows below {len(logits)} in int64",
    )
    _check(
        bits.dtype == torch.int32
        and bits.dim() == 2
        and len(bits) == len(rows)
        and 32 * bits.shape[1] >= logits.shape[1],
        f"{logits.shape[1]} bits in int32 for each of {len(rows)} rows, not {tuple(bits.shape)} of {bits.dtype}",
    )
    return rows.contiguous(), bits.contiguous()


def _check(holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"native samples take {wanted}")

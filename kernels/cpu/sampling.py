"""Masks and draws of tokens by native kernels (`src/drawing.h`). A row's token does not depend on other rows."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.ops import Ops
from kernels.sampling import DrawShapes


def with_native_draws(ops: Ops) -> Ops:
    """Return `ops` with these functions, where there are native kernels."""
    return ops if library.native() is None else replace(ops, mask=mask, argmax=argmax, draw=draw)


def mask(logits: Tensor, rows: Tensor, bits: Tensor, isa: library.Isa | None = None) -> None:
    """`Ops.mask`. `isa` None: the fastest, here and below."""
    count = _checked(logits)
    _check(
        rows.dtype == torch.int64 and rows.dim() == 1 and bool(((rows >= 0) & (rows < len(logits))).all()),
        f"rows below {len(logits)} in int64",
    )
    _check(
        bits.dtype == torch.int32
        and bits.dim() == 2
        and len(bits) == len(rows)
        and 32 * bits.shape[1] >= count,
        f"{count} bits in int32 for each of {len(rows)} rows, not {tuple(bits.shape)} of {bits.dtype}",
    )
    places, words = rows.contiguous(), bits.contiguous()
    library.loaded().baton_mask(
        _isa(isa), logits.data_ptr(), count, places.data_ptr(), words.data_ptr(), words.shape[1], len(places), _threads()
    )  # fmt: skip


def argmax(logits: Tensor, isa: library.Isa | None = None) -> Tensor:
    """`Ops.argmax`"""
    count = _checked(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    library.loaded().baton_argmax(
        _isa(isa), logits.data_ptr(), len(logits), count, tokens.data_ptr(), _threads()
    )
    return tokens


def draw(logits: Tensor, draws: DrawShapes, isa: library.Isa | None = None) -> Tensor:
    """`Ops.draw`"""
    count = _checked(logits)
    _check(
        draws.columns.shape == (5, len(logits)) and draws.columns.dtype == torch.float64,
        f"(5, {len(logits)}) numbers of float64, not {tuple(draws.columns.shape)} of {draws.columns.dtype}",
    )
    columns = draws.columns.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64)
    library.loaded().baton_draw(
        _isa(isa), logits.data_ptr(), len(logits), count, columns.data_ptr(), tokens.data_ptr(), _threads()
    )
    return tokens


def _checked(logits: Tensor) -> int:
    """Return the number of tokens. Pointers know no types and no bounds."""
    _check(
        logits.dim() == 2
        and logits.shape[1] > 0
        and logits.dtype == torch.float32
        and logits.is_contiguous(),
        f"contiguous logits (N, V) of float32, not {tuple(logits.shape)} of {logits.dtype}",
    )
    return logits.shape[1]


def _isa(isa: library.Isa | None) -> library.Isa:
    return library.fastest_exact() if isa is None else isa


def _threads() -> int:
    return torch.get_num_threads()


def _check(holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"native draws take {wanted}")

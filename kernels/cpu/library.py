"""The library of native kernels, loaded at its first use, and which instruction sets it may use here."""

import logging
from ctypes import CDLL, c_float, c_int, c_int64, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

from kernels.cpu.build import BuildError, library_path

_log = logging.getLogger(__name__)
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "baton_has": (c_int, (c_int,)),
    "baton_packed_bytes": (c_int64, (c_int, c_int64, c_int64, c_int64, c_int, c_int)),
    "baton_pack_floats": (None, (c_int, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int)),
    "baton_pack_whole": (
        None,
        (c_int, c_int64, c_int64, c_int64, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    ),
    "baton_linear": (
        None,
        (
            *(c_int, c_int, c_int64, c_int64, c_int64, c_int, c_int),
            *(c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int),
        ),
    ),
    "baton_lanes": (c_int64, (c_int,)),
    "baton_attend": (
        None,
        (
            *(c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64),
            *(c_void_p, c_void_p, c_int64, c_int64, c_float, c_float, c_void_p),
            *(c_int64, c_void_p, c_void_p, c_void_p, c_int),
        ),
    ),
    "baton_mask": (None, (c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int)),
    "baton_argmax": (None, (c_int, c_void_p, c_int64, c_int64, c_void_p, c_int)),
    "baton_draw": (None, (c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int)),
    "baton_read": (c_uint64, (c_int, c_void_p, c_int64, c_int)),
}
"""(result, arguments) of each function of `src/api.cpp`."""


class Isa(IntEnum):
    """Instruction sets, as `src/api.cpp` numbers them; a later one is faster."""

    AVX2 = 0
    """With FMA and F16C."""
    AVX512 = 1
    """F, BW, DQ, VL and VNNI."""


def load(path: Path) -> CDLL:
    """The library at `path`, with its functions' types."""
    library = CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def native() -> CDLL | None:
    """None where there is no library, or no instruction set for it: the log says why, once."""
    try:
        library = load(library_path())
    except (BuildError, OSError) as error:
        _log.warning(
            "PyTorch computes products, in float32: there are no native kernels here, since %s", error
        )
        return None
    if not library.baton_has(Isa.AVX2):
        _log.warning("PyTorch computes products, in float32: this processor lacks AVX2, FMA or F16C")
        return None
    return library


def instruction_sets() -> list[Isa]:
    """Return the instruction sets of this processor, the fastest last; none without `native`."""
    library = native()
    return [] if library is None else [isa for isa in Isa if library.baton_has(isa)]
